"""Through the real engine: sampled requests have exactly the target's distribution, whatever trees are drafted."""

from __future__ import annotations

import pytest

from tests.sglang.conftest import SIX_TOKENS as VOCAB
from tests.sglang.conftest import sglang_engine
from tests.support.distributions import assert_distribution, enumerate_outputs

TOKENS, SAMPLES = 3, 1500
PROMPT = [1, 3, 5, 4]


@pytest.fixture(scope="module")
def engine(six):
    with sglang_engine(
        six,
        speculative_algorithm="wild",
        speculative_num_draft_tokens=12,
        skip_tokenizer_init=True,
        max_running_requests=64,
        max_total_tokens=16384,
    ) as engine:
        yield engine


@pytest.mark.parametrize(
    "temperature, filters",
    [(1.0, {}), (2.5, {"top_k": 4}), (1.5, {"top_p": 0.8}), (2.0, {"min_p": 0.2}), (2.0, {"top_k": 5, "min_p": 0.1})],
    ids=lambda value: " ".join(value) or "plain" if isinstance(value, dict) else None,
)
def test_distribution(six, engine, temperature, filters):
    options = {"temperature": temperature, "max_new_tokens": TOKENS, "ignore_eos": True} | filters
    outputs = engine.generate(input_ids=[PROMPT] * SAMPLES, sampling_params=options)
    kept = {"top_k": VOCAB, "top_p": 1.0} | filters
    expected = enumerate_outputs(six, PROMPT, TOKENS, temperature=temperature, **kept)
    assert_distribution([tuple(output["output_ids"]) for output in outputs], expected)


def test_drafts_were_accepted(engine):
    options = {"temperature": 1.0, "max_new_tokens": 40, "ignore_eos": True}
    outputs = engine.generate(input_ids=[PROMPT] * 16, sampling_params=options)
    assert sum(o["meta_info"]["spec_accept_length"] for o in outputs) / 16 > 1.2
