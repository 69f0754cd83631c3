"""Times of sublayers from those of passes, on machines that do something else besides."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from layerskip_plugin.calibrate import pass_times
from layerskip_plugin.calibrate.pass_times import MOST_ROUNDS, ROUNDS, VERIFIED, engine_times
from layerskip_plugin.skip_set import SkipSet

LAYERS, ATTENTION, MLP, HEAD = 6, 1.0, 3.0, 5.0


class Machine:
    """Passes that move a clock; the one without every second attention is held up for its first calls."""

    def __init__(self, held_up: int) -> None:
        self.now, self.held_up, self.calls = 0.0, held_up, 0

    def work(self, seconds: float, *, held_up: bool = False) -> Callable[[], None]:
        def run() -> None:
            self.now += seconds
            if held_up:
                self.calls += 1
                self.now += 100.0 * (self.calls <= self.held_up)

        return run

    def times(self) -> pass_times.PassTimes:
        whole = LAYERS * (ATTENTION + MLP) + HEAD
        half = (LAYERS + 1) // 2
        passes = [
            self.work(whole),
            self.work(whole - half * ATTENTION, held_up=True),
            self.work(whole - half * MLP),
        ]
        return engine_times(passes, [self.work(whole + n) for n in VERIFIED], LAYERS, 500)


@pytest.mark.parametrize("held_up", [0, ROUNDS, 3 * ROUNDS])
def test_the_parts_of_a_pass(held_up: int, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(held_up)
    monkeypatch.setattr(pass_times.time, "perf_counter", lambda: machine.now)
    times = machine.times()
    assert (times.attention, times.mlp, times.head) == pytest.approx((ATTENTION, MLP, HEAD))
    assert times.verify(12) - times.verify(1) == pytest.approx(11)
    skip = SkipSet(LAYERS, frozenset({0, 1}), frozenset({2}), "m")
    assert times.draft(skip) == pytest.approx(LAYERS * (ATTENTION + MLP) + HEAD - 2 * ATTENTION - MLP)


def test_a_machine_that_never_rests_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(10**9)
    monkeypatch.setattr(pass_times.time, "perf_counter", lambda: machine.now)
    with pytest.raises(ValueError, match=r"context 500: .* on a machine this busy: run it again"):
        machine.times()
    assert MOST_ROUNDS <= machine.calls <= 2 * MOST_ROUNDS
