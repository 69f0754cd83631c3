"""Requests that run to the end of the context, through a real engine: SGLang's rows of KV slots end soon behind it."""

from __future__ import annotations

import pytest

from tests.sglang.conftest import GREEDY, ids, sglang_engine
from tests.support.models import continuations

LONGEST = 96
PROMPTS = [[7, 8, 9] * n for n in (4, 9, 20, 28)]


@pytest.mark.extended
def test_same_answers(tiny, tmp_path):
    """Drafts as wide as they may be take no more slots than there are."""
    expected = [tokens[: LONGEST - len(p)] for p, tokens in zip(PROMPTS, continuations(tiny, PROMPTS, 84), strict=True)]
    options = {"speculative_algorithm": "sssd_cycle", "speculative_num_draft_tokens": 16}
    options |= {"context_length": LONGEST, "page_size": 1}
    asked = [GREEDY | {"max_new_tokens": LONGEST - len(p)} for p in PROMPTS]
    with sglang_engine(tiny, tmp_path / "counts.json", {"TREE_TEST_WIDTHS": "16"}, **options) as engine:
        for _ in range(2):
            found = ids(engine.generate(input_ids=PROMPTS, sampling_params=asked))
            assert max(len(p) + len(a) for p, a in zip(PROMPTS, found, strict=True)) >= LONGEST - 2
            assert found == [tokens[: len(a)] for tokens, a in zip(expected, found, strict=True)]
