"""Adaptive verification on model runner V2: which draft tokens of a batch are verified."""

from itertools import chain

import pytest
from v2_engines import CRAMPED, SMALL, SSSD, plain, run
from vllm_cases import TINY, greedy_case, seeded_case, token_prompts

from tests.support.built_head import save_model_and_head
from tests.support.prompts import random_ids


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


@pytest.mark.extended
def test_tokens_of_a_head_and_n_grams_behind_them_are_ranked_together(tmp_path):
    """By vLLM, under preemption, aborts, and a drafter of ours that fails. The head drafts as it does alone."""
    model, head = save_model_and_head(tmp_path, 0.3, **TINY)
    k, longest = 3, 7
    greedy = greedy_case(token_prompts(random_ids([12] * 6, 24, first=2, seed=3)), 20)
    cases = {"first": greedy, "again": greedy, "seeded": seeded_case(), "aborted": greedy | {"abort": 5}}
    cases["fails"] = greedy | {"fails": True}
    own = {"model": head, "num_speculative_tokens": k}
    ours = own | {"method": "sssd+eagle", "policy": "fixed", "ngram_tokens": longest}
    given = {"model": model, "own": k, **SMALL, "max_num_seqs": 8, "max_model_len": 128}
    few = {name: cases[name] for name in ("first", "seeded")}
    cramped = {"max_num_batched_tokens": 100, "num_gpu_blocks_override": 9, "block_size": 32, "by_score": True}
    plain, stock, found = run(
        "on_top.py",
        [
            given | {"cases": few, "own": 0},
            given | {"cases": few, "speculative_config": own | {"method": "eagle"}},
            given | cramped | {"cases": cases, "speculative_config": ours},
        ],
    )
    known = {tuple(text): draft for text, draft in stock["first"]["own drafts"]}
    for case in cases:
        assert found[case]["answers"] == plain["seeded" if case == "seeded" else "first"]["answers"], case
        same = [known.get(tuple(text), draft) == draft for text, draft in found[case]["own drafts"]]
        assert all(same) and (case == "seeded" or len(same) > 10)
    assert found["fails"]["failures"] > 0 == found["again"]["failures"]
    assert sum(found[case]["preempted"] for case in cases) > 0
    drafted, accepted = found["again"]["n-grams"]
    assert drafted >= accepted > 20
    verified = [*chain(*found["engine"]["verified"])]
    assert min(verified) < k < max(verified), "of some requests the n-grams, of others not even the head's tokens"
    assert len({sum(counts) for counts in found["engine"]["verified"]}) > 3
    behind = []
    for likely, taken in found["engine"]["likely"]:
        for row, is_taken in zip(likely, taken, strict=True):
            assert min(row[:k]) > 0 and (is_taken or not any(row[k:])), "nothing goes on behind"
            behind += row[k:] if is_taken else []
    assert sum(p > 0.3 for p in behind) > 50 and max(behind) <= 1
