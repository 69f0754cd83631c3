"""Step times measured while serving: medians, straight lines between, and low guesses where nothing is known."""

from __future__ import annotations

import numpy as np
import pytest

from layerskip_plugin.served_times import ENOUGH, SAMPLES, ServedTimes


def test_guesses_before_and_knows_after():
    times = ServedTimes(0.5)
    assert not times.plain_known(1)
    for _ in range(ENOUGH):
        times.note_step(1, 1, 0.040)
    assert times.plain_known(1) and not times.plain_known(2)
    assert times.plain(1) == pytest.approx(0.040)
    assert times.draft(1) == pytest.approx(0.020), "a pass is taken for its share of the weights"
    assert times.verify(1, 9) == pytest.approx(0.040), "more tokens are taken to be free until they are tried"
    times.note_draft(1, 0.030)
    times.note_step(1, 9, 0.060)
    assert times.draft(1) == pytest.approx(0.030)
    assert times.verify(1, np.array([1, 5, 9, 20])) == pytest.approx([0.040, 0.050, 0.060, 0.060])
    assert times.plain(1) == pytest.approx(0.040), "a step with drafts is no plain one"


def test_one_slow_step_changes_nothing_and_a_new_level_does():
    times = ServedTimes(0.5)
    for _ in range(SAMPLES):
        times.note_step(2, 2, 0.010)
    times.note_step(2, 2, 3.0)
    assert times.plain(2) == pytest.approx(0.010)
    for _ in range(SAMPLES):
        times.note_step(2, 2, 0.020)
    assert times.plain(2) == pytest.approx(0.020)


def test_more_tokens_never_look_cheaper():
    times = ServedTimes(0.5)
    times.note_step(1, 1, 0.040)
    times.note_step(1, 4, 0.030)
    assert times.verify(1, np.array([1, 4])).tolist() == [0.040, 0.040]
