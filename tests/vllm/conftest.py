"""Models for the tests: the demo model, and a random one with a tiny vocabulary."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO_MODEL = Path(os.environ.get("FREEDRAFT_TEST_MODEL", REPOSITORY / "build" / "model"))
TINY_VOCABULARY = 24


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session", autouse=True)
def vllm_installed() -> None:
    pytest.importorskip("vllm")


@pytest.fixture(scope="session")
def demo_model() -> Path:
    if not (DEMO_MODEL / "config.json").is_file():
        pytest.skip(f"no demo model at {DEMO_MODEL}: make it, or set FREEDRAFT_TEST_MODEL")
    return DEMO_MODEL


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Llama whose next-token probabilities are uneven, with a vocabulary of 24 and no tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=TINY_VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=False,
        dtype="float32",
    )
    folder = tmp_path_factory.mktemp("tiny_model")
    model = LlamaForCausalLM(config)
    model.lm_head.weight.data.mul_(0.5)
    model.save_pretrained(folder)
    return folder
