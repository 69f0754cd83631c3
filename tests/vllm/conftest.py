"""Models for vLLM's tests, and what plain engines answer: one engine per model records it, once for all tests.

A test that compares with `plain_demo` or `plain_tiny` asks for it before it starts an engine of its own: two do not go
together in one process.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import vllm_cases as cases
from vllm_engines import check_nothing_is_left, engine, runner_of, running

from tests.support import prompts
from tests.support.models import continuations, save
from tests.support.models import tiny_model as make_tiny


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)


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


@pytest.fixture(scope="session")
def demo_prompts(demo_model):
    """15 prompts as token ids; the last three are longer than one chunk of a cramped engine."""
    ids = prompts.chat_and_raw_ids(demo_model)
    assert all(len(tokens) + cases.TOKENS < cases.MAX_MODEL_LEN for tokens in ids)
    return cases.token_prompts(ids)


@pytest.fixture(scope="session")
def long_prompts(demo_prompts):
    """Prompts that leave 3, 9 and 30 tokens up to MAX_MODEL_LEN."""
    tokens = (demo_prompts[12]["prompt_token_ids"] + demo_prompts[0]["prompt_token_ids"]) * 6
    return cases.token_prompts([tokens[: cases.MAX_MODEL_LEN - room] for room in (3, 9, 30)])


@pytest.fixture(scope="session")
def plain_demo(demo_model, demo_prompts, long_prompts):
    """What the engine says without us, with room for everything; of greedy answers a beginning is compared."""
    asked = {
        "prompts": (demo_prompts, cases.parameters(cases.TOKENS)),
        "long": (long_prompts, cases.parameters(cases.TOKENS)),
        "mixed": (cases.MIXED, cases.parameters(cases.TOKENS)),
        "structured": (demo_prompts[cases.STRUCTURED_PROMPTS], cases.structured()),
        "penalised": (demo_prompts[:4], cases.penalised()),
        "sampled": ([prompts.SHORT[5]], cases.parameters(60, ignore_eos=True, **cases.SAMPLED)),
    }
    with engine(demo_model, max_model_len=cases.MAX_MODEL_LEN, max_num_seqs=8) as llm:
        return {name: cases.generate(llm, *given) for name, given in asked.items()}


@pytest.fixture(scope="session")
def live_prompts():
    return cases.token_prompts(prompts.random_ids([12] * 6, 24, first=2, seed=3))


@pytest.fixture(scope="session")
def tiny_answers(tiny_model, live_prompts):
    """Greedy answers of 30 tokens to `live_prompts`."""
    return continuations(tiny_model, [prompt["prompt_token_ids"] for prompt in live_prompts], 30)


@pytest.fixture(scope="session")
def plain_tiny(tiny_model):
    with engine(tiny_model, **cases.SAMPLING_ENGINE) as llm:
        return cases.PlainTiny(
            {setting: cases.sample(llm, setting) for setting in cases.SETTINGS},
            cases.with_logprobs(llm.generate(*cases.seeded(), use_tqdm=False)),
            cases.sample(llm, (0.0, 1.0, 0, False), 1)[0],
            runner_of(llm).model,
        )


@pytest.fixture(scope="session")
def plain_seeded(tiny_model):
    """What model runner V2 says without us to the requests of `seeded_case`, with room for everything."""
    from test_vllm_v2 import serve

    engine = {"skip_tokenizer_init": True, "max_model_len": 64, "attention": "flash", "gpu_memory_utilization": 0.2}
    return serve(tiny_model, cases={"seeded": cases.seeded_case()}, **engine)["seeded"]


@pytest.fixture(scope="session")
def demo_fingerprint(demo_model):
    from layerskip_plugin.skip_set import model_fingerprint

    return model_fingerprint(json.loads((demo_model / "config.json").read_text()))
