"""Engines for the tests: stock SGLang and SGLang with us, on the CPU platform, in fp32, over a tiny random model."""

import asyncio
import importlib.util
import json
import os
import sys
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.models import save, tiny_model

HERE = Path(__file__).parent
HAVE_SGLANG = importlib.util.find_spec("sglang") is not None
ENVIRONMENT = {
    "SGLANG_PLATFORM": "freedraft_cpu",
    "HF_HUB_OFFLINE": "1",
    "FREEDRAFT_POLICY": "fixed",
    "FREEDRAFT_SCORING": "paper",
    "FREEDRAFT_LIVE": "off",  # the same prompts are asked again
}

GREEDY = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}

if HAVE_SGLANG:  # before SGLang is first imported, in this process too
    os.environ.update({name: ENVIRONMENT[name] for name in ("SGLANG_PLATFORM", "HF_HUB_OFFLINE")})


@pytest.fixture(scope="session", autouse=True)
def sglang_installed():
    pytest.importorskip("sglang")


def make_tiny(folder: Path, *, vocab_size: int, tokenizer: Path | None) -> Path:
    """A random Llama of two layers in Hugging Face layout."""
    model = tiny_model(seed=3, vocab_size=vocab_size, max_position_embeddings=2048)
    return save(model, folder, tokenizer)


@pytest.fixture(scope="session")
def tiny(demo_model, tmp_path_factory) -> Path:
    """The tiny model with the demo model's vocabulary and tokenizer."""
    return make_tiny(tmp_path_factory.mktemp("tiny"), vocab_size=49152, tokenizer=demo_model)


@contextmanager
def sglang_engine(model: Path, counts: Path | None = None, env: Mapping[str, str | None] | None = None, **options):
    """A `sglang.Engine` on the CPU platform; `counts` gets what the verify worker has done."""
    changed = {
        **ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join([str(HERE / "plugin"), os.environ.get("PYTHONPATH", "")]),
        "TREE_TEST_COUNTS": str(counts or ""),
        **(env or {}),
    }
    if str(HERE / "plugin") not in sys.path:
        sys.path.append(str(HERE / "plugin"))
    defaults = {"model_path": str(model), "device": "cpu", "dtype": "float32", "disable_cuda_graph": True}
    defaults |= {"attention_backend": "torch_native", "sampling_backend": "pytorch", "random_seed": 1}
    defaults |= {"max_total_tokens": 8192, "max_running_requests": 4}
    defaults |= {"skip_server_warmup": True, "log_level": "warning"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in changed.items():
            patch.setenv(name, value) if value is not None else patch.delenv(name, raising=False)
        import sglang

        engine = sglang.Engine(**{**defaults, **options})
        try:
            yield engine
        finally:
            engine.shutdown()


async def give_up(engine, prompts, sampling, leaving=None):
    """Ask for long answers; the clients of the first `leaving` go away soon, or all of them."""
    names = [f"given-up-{i}" for i in range(len(prompts))]
    running = engine.async_generate(input_ids=list(prompts), sampling_params=sampling, rid=names)
    running = asyncio.create_task(running)
    await asyncio.sleep(0.5)
    for name in names[:leaving]:
        engine.tokenizer_manager.abort_request(rid=name)
    await asyncio.gather(running, return_exceptions=True)


def ids(outputs):
    return [output["output_ids"] for output in outputs]


def token_ids(model: Path, texts):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    return [tokenizer(text)["input_ids"] for text in texts]


def read_counts(path: Path) -> dict[str, int]:
    counts = json.loads(path.read_text())
    assert not counts.get("failures"), "drafting failed, and the engine went on without it"
    assert not counts.get("wrong texts"), "the drafter's text is not the request's"
    return counts
