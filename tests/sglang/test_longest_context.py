"""Requests that run to the end of the context, through real engines: SGLang's rows of KV slots end soon behind it."""

from __future__ import annotations

import pytest

from tests.sglang.conftest import sglang_engine

SHORT = {"context_length": 96, "page_size": 1}
OURS = {"speculative_algorithm": "sssd_cycle", "speculative_num_draft_tokens": 16}
PROMPTS = [[7, 8, 9] * n for n in (4, 9, 20, 28)]
ASKED = {
    "input_ids": PROMPTS,
    "sampling_params": [{"temperature": 0, "ignore_eos": True, "max_new_tokens": 96 - len(p)} for p in PROMPTS],
}


def answers(engine):
    return [output["output_ids"] for output in engine.generate(**ASKED)]


@pytest.fixture(scope="module")
def expected(tiny):
    with sglang_engine(tiny, disable_overlap_schedule=True, **SHORT) as engine:
        found = answers(engine)
    assert max(len(p) + len(a) for p, a in zip(PROMPTS, found, strict=True)) >= 94
    return found


@pytest.mark.extended
def test_same_answers(tiny, tmp_path, expected):
    """Drafts as wide as they may be take no more slots than there are."""
    with sglang_engine(tiny, tmp_path / "counts.json", {"TREE_TEST_WIDTHS": "16"}, **OURS, **SHORT) as engine:
        assert answers(engine) == expected == answers(engine)
