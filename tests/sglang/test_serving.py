"""The real model, and what is refused at the start."""

from __future__ import annotations

import pytest

from tests.sglang.conftest import read_counts, sglang_engine
from tests.support.models import continuations
from tests.support.prompts import SHORT


def test_real_model(demo_model, tmp_path):
    """Twelve prompts to the demo model: its own tokens, and some drafts accepted."""
    from transformers import AutoTokenizer

    greedy = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    prompts = [AutoTokenizer.from_pretrained(demo_model)(text)["input_ids"] for text in SHORT]
    expected = continuations(demo_model, prompts, 24)
    options = {"max_running_requests": 12, "max_total_tokens": 4096, "speculative_num_draft_tokens": 8}
    counts = tmp_path / "counts.json"
    with sglang_engine(demo_model, counts, speculative_algorithm="sssd", **options) as engine:
        assert [o["output_ids"] for o in engine.generate(SHORT, greedy)] == expected
    done = read_counts(counts)
    assert done["tokens"] > 1.05 * done["request_steps"]


def test_bad_options_stop_the_start(tiny):
    """In the front-end process, before a scheduler starts: quick, and the reason is the exception's text."""
    with (
        pytest.raises(Exception, match="no hardware profile 'abacus'"),
        sglang_engine(tiny, env={"FREEDRAFT_HARDWARE": "abacus"}, speculative_algorithm="sssd"),
    ):
        pass
    with (
        pytest.raises(Exception, match="sssd cannot verify trees on attention backend triton"),
        sglang_engine(tiny, speculative_algorithm="sssd", attention_backend="triton"),
    ):
        pass
