"""Step times measured while serving: the typical ones, lines between them, low guesses where nothing is known."""

from __future__ import annotations

import numpy as np
import pytest

from layerskip_plugin.served_times import ENOUGH, PLAIN_EVERY, SAMPLES, PlainTurns, ServedTimes


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


def test_slow_times_are_not_believed_for_ever(monkeypatch: pytest.MonkeyPatch):
    """Where they keep drafting off, passes are measured only when it is tried again, long after."""
    clock = [100.0]
    monkeypatch.setattr("layerskip_plugin.served_times.time.monotonic", lambda: clock[0])
    times = ServedTimes(0.5)
    for _ in range(SAMPLES):
        times.note_draft(1, 0.050)
    for _ in range(2):
        clock[0] += 10
        times.note_draft(1, 0.010)
    assert times.draft(1) == pytest.approx(0.010)
    # One slow one among what was right before changes nothing, however old that is.
    clock[0] += 10
    times.note_draft(1, 0.090)
    assert times.draft(1) == pytest.approx(0.010)


def test_a_busy_moment_does_not_change_what_is_compared():
    """Plain steps of a busy second would make passes of the quiet one before it look cheap."""
    times = ServedTimes(0.5)
    for _ in range(SAMPLES):
        times.note_draft(1, 0.009)
        times.note_step(1, 1, 0.010)
    for _ in range(SAMPLES // 2):
        times.note_step(1, 1, 0.030)
    assert times.draft(1) / times.plain(1) == pytest.approx(0.9)


def test_more_tokens_never_look_cheaper():
    times = ServedTimes(0.5)
    times.note_step(1, 1, 0.040)
    times.note_step(1, 4, 0.030)
    assert times.verify(1, np.array([1, 4])).tolist() == [0.040, 0.040]


def test_plain_steps_come_often_at_first_then_rarely():
    turns = PlainTurns()
    plain = [step for step in range(3000) if turns.due(4)]
    assert plain[:3] == [4, 13, 30]
    assert set(np.diff(plain[-4:]).tolist()) == {PLAIN_EVERY + 1}
    assert len(plain) < 0.01 * 3000
    assert not turns.due(2), "each batch size has its own turns"
