"""Models for vLLM's tests, and what they answer. Two engines do not go together in one process."""

import os

import pytest
import v2_engines
import vllm_cases as cases
from vllm_engines import check_nothing_is_left, running

from tests.support import prompts
from tests.support.models import continuations, save
from tests.support.models import tiny_model as make_tiny


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Of the promises on model runner V2, those that take the interpreter longest are for `make test-all`."""
    long = "test_answers", "test_to_the_end", "test_what_changes", "test_samples", "test_a_drafter_that_fails"
    few = "own[fixed]", "own[both, fixed]", "context[fixed]", "[grammar-fixed]"
    for item in items if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1" else ():
        if item.cls and item.name.startswith(long) and not item.name.endswith(few):
            item.add_marker(pytest.mark.extended)
            item.add_marker(pytest.mark.rare)


@pytest.fixture(scope="session", autouse=True)
def vllm_installed():
    pytest.importorskip("vllm")


@pytest.fixture(autouse=True)
def nothing_failed_or_leaked():
    """After each test, of an engine in this process that goes on."""
    yield
    for llm in running:
        check_nothing_is_left(llm)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory):
    """A random Llama whose next-token probabilities are uneven, with a vocabulary of 24 and no tokenizer."""
    model = make_tiny(seed=7, **cases.TINY)
    model.lm_head.weight.data.mul_(0.5)
    return save(model, tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture
def as_with_triton(monkeypatch):
    """What vLLM decides on a GPU: there is Triton, and nobody says which model runner is to serve."""
    from vllm import triton_utils
    from vllm.config import vllm as vllm_config

    for module in (triton_utils, vllm_config):
        monkeypatch.setattr(module, "HAS_TRITON", True)
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)


@pytest.fixture(scope="session")
def live_prompts():
    return cases.token_prompts(prompts.random_ids([12] * 6, 24, first=2, seed=3))


@pytest.fixture(scope="session")
def tiny_answers(tiny_model, live_prompts):
    """Greedy answers of 30 tokens to `live_prompts`."""
    return continuations(tiny_model, [prompt["prompt_token_ids"] for prompt in live_prompts], 30)


@pytest.fixture(scope="session")
def given(tiny_model, live_prompts, tiny_answers, tmp_path_factory):
    """What engines on model runner V2 are made of."""
    return v2_engines.Given(tiny_model, live_prompts, tiny_answers, tmp_path_factory.mktemp("v2"))


@pytest.fixture(scope="session")
def on_cpu(given):
    """What engines on model runner V2 with vLLM's attention of CPUs say, by name."""
    return v2_engines.on_cpu(given)


@pytest.fixture(scope="session")
def on_flash(given):
    return v2_engines.on_flash(given)


@pytest.fixture(scope="session")
def plain_seeded(on_cpu):
    """What model runner V2 says without us to the requests of `seeded_case`."""
    return on_cpu["plain"]["seeded"]
