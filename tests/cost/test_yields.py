"""What trees of each size bring, learnt from steps."""

from __future__ import annotations

import numpy as np
import pytest

from freedraft.cost.batch_lengths import candidate_lengths
from freedraft.cost.yields import TreeYields

SIZES = np.array(candidate_lengths(32))


def test_a_size_that_is_verified_is_known_and_the_others_follow() -> None:
    yields, random = TreeYields(32), np.random.default_rng(0)
    before = yields.tokens(SIZES)
    for _ in range(2000):
        yields.record(np.full(4, 16, np.int32), random.integers(2, 5, 4).astype(np.int32))  # 3 on average
    after = yields.tokens(SIZES)
    at = SIZES.tolist().index(16)
    assert after[at] == pytest.approx(4.0, abs=0.15)
    factor = (after[at] - 1) / (before[at] - 1)
    assert (after - 1)[1:] == pytest.approx((before - 1)[1:] * factor, rel=0.15)
    assert after[0] == 1.0


def test_what_the_scheduler_cut_or_left_out_says_nothing() -> None:
    yields = TreeYields(32)
    before = yields.tokens(SIZES)
    yields.record(np.zeros(3, np.int32), np.zeros(3, np.int32))
    yields.record(np.zeros(0, np.int32), np.zeros(0, np.int32))
    assert np.array_equal(yields.tokens(SIZES), before)
    cut, whole = TreeYields(32), TreeYields(32)
    cut.record(np.array([32, 5], np.int32), np.array([3, 0], np.int32))
    whole.record(np.array([32], np.int32), np.array([3], np.int32))
    assert np.array_equal(cut.tokens(SIZES), whole.tokens(SIZES))
