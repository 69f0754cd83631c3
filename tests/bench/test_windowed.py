"""What bench/windowed.py reads off the calls of a drafter."""

from __future__ import annotations

import itertools

import pytest

from bench.lib.switch import Call, Turns
from bench.windowed import TURN, Steps, allowed, figures

PLAIN, PASS, LENGTH = 0.1, 0.05, 2


def steps(in_turns: bool, count: int, *, drafts: bool, accepted: int, drift: float = 0.0) -> list[tuple[bool, Steps]]:
    """A run of two requests, in turns or not: a draft token makes verification a tenth longer."""
    turns, calls, now = Turns(TURN), [], 0.0  # a step in six of those that always may draft does not
    before = [1, 1]
    for i in range(count + 1):
        on = turns(None) if in_turns else i % 6 > 0  # type: ignore[arg-type]
        length = LENGTH if on and drafts else 0
        slow = 1 + drift * i
        began, ended = now, now + length * PASS * slow
        calls.append(Call(began, ended, on, ["a", "b"], 100, before, [length] * 2, 2, [112] * 2))
        now = ended + PLAIN * (1 + 0.1 * length) * slow
        before = [1 + min(accepted, length)] * 2
    return [(in_turns, list(itertools.pairwise(calls)))]


def test_the_ratio_is_that_of_turns_beside_each_other_on_a_machine_that_slows_down() -> None:
    row = figures(steps(True, 64, drafts=True, accepted=LENGTH, drift=0.01), 5)
    expected = 3 * PLAIN / (LENGTH * PASS + 1.2 * PLAIN)
    assert row["ratio"] == pytest.approx(expected, rel=0.02) and row["turns"] == 64 // (4 * TURN)
    assert row["M"] == 3 and row["drafting_share"] == 1


def test_what_the_times_allow_counts_drafts_of_all_answers_and_no_drafts() -> None:
    row = figures(steps(True, 32, drafts=False, accepted=0), 5)
    assert row["ratio"] == pytest.approx(1) and row["allowed"] == 1 and row["rounds"] == 0
    learnt = steps(False, 12, drafts=True, accepted=LENGTH)
    row = figures([*learnt, *steps(True, 32, drafts=False, accepted=0)], 5)
    # Both tokens are accepted: three come in two passes of half a step and 1.2 steps; more of them never ran.
    assert row["allowed"] == pytest.approx(3 / 2.2) and row["rounds"] == 10
    poor = steps(False, 12, drafts=True, accepted=0)
    assert figures([*poor, *steps(True, 32, drafts=False, accepted=0)], 5)["allowed"] == 1


def test_verification_is_as_measured_by_length_and_no_further() -> None:
    """The first draft token costs a third of a step, all others a twentieth; five never ran."""

    def rounds(length: int, seconds: float) -> list[tuple[Call, Call]]:
        ids, kinds = ["a"], [112]
        first = Call(0.0, length * 0.02, True, ids, 50, [1], [length], 1 + length, kinds)
        after = Call(first.ended + seconds, 9.0, True, ids, 50, [1 + length], [0], 1, [0])
        return [(first, after)] * 6

    plain = [
        (
            Call(0.0, 0.0, False, ["a"], 50, [1], [0], 1, [0]),
            Call(0.1, 0.1, False, ["a"], 50, [1], [0], 1, [0]),
        )
    ]
    times = {1: 0.133, 2: 0.138, 4: 0.148}
    row = allowed([[*plain * 3, *(step for n, seconds in times.items() for step in rounds(n, seconds))]], 5)
    assert row["verify"] == pytest.approx([1.33, 1.38, 1.43, 1.48]) and row["c"] == pytest.approx(0.2)
    assert row["allowed"] == pytest.approx(5 / (4 * 0.2 + 1.48))
