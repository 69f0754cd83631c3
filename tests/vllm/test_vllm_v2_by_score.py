"""Adaptive verification on model runner V2: which draft tokens of a batch are verified."""

import pytest
from v2_engines import CRAMPED, SMALL, SSSD, plain, run
from vllm_cases import greedy_case, seeded_case


@pytest.mark.extended
def test_the_likeliest_draft_tokens_of_the_batch_are_verified(given):
    """As many as a forecast says."""
    cases = {"greedy": greedy_case(given.prompts, abort=6), "seeded": seeded_case()}
    engine = {"model": given.model, "cases": cases, "speculative_config": SSSD, "by_score": True} | SMALL | CRAMPED
    without, found = run("serve.py", [plain(given), engine], "flash")
    assert found["greedy"] == given.answers and found["seeded"] == without["seeded"]
    engine = found["engine"]
    assert engine["drafted"] > engine["accepted"] > 25 and not engine["failures"] and engine["preempted"] > 0
    chosen, learnt = engine["by score"]["chosen"], engine["by score"]["learnt"]
    assert len(chosen) > 25 and len(learnt) > 25 and all(learnt), "drafts are learnt from before they are overwritten"
    uneven = 0
    for budget, scores, counts in chosen:
        assert sum(counts) == budget and max(counts) <= 3
        taken = [p for row, n in zip(scores, counts, strict=True) for p in row[:n]]
        left = [p for row, n in zip(scores, counts, strict=True) for p in row[n:]]
        assert min(taken) >= max(left, default=0.0)
        uneven += max(counts) > min(counts) + 1
    assert uneven > 5 and len({budget for budget, _, _ in chosen}) > 3
