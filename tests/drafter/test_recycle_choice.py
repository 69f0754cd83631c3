"""Whether recycled logits are used, by what they bring: a clock and an engine whose speeds are known."""

from __future__ import annotations

import numpy as np
import pytest

from freedraft.method import Step
from sssd_plugin.recycle_choice import RecycleChoice


class Engine:
    """Steps of a batch that take one second, or a little more with logits, and yield so many tokens per request."""

    def __init__(self, recycle: str) -> None:
        self.now = 0.0
        self.choice = RecycleChoice(recycle, lambda: self.now)  # type: ignore[arg-type]

    def run(self, steps: int, batch: int, with_logits: int, cost: float, previous: bool = True) -> float:
        """Share of the steps that were taken with logits, which yield `with_logits` tokens where others yield 2."""
        taken = 0
        for _ in range(steps):
            gained = with_logits if self.choice.on else 2
            self.now += 1.0 + (cost if self.choice.on else 0.0)
            taken += self.choice.on
            ends = np.arange(1, batch + 1) * gained
            self.choice.update(
                Step(
                    request_ids=[str(i) for i in range(batch)],
                    tokens=np.zeros(batch * gained, np.int32),
                    starts=ends - gained,
                    ends=ends,
                    contexts=np.full(batch, 100, np.int32),
                    capacities=np.full(batch, 8, np.int32),
                    drafted=np.full(batch, 8, np.int32),
                    widths=None,
                    previous=(batch, batch * 9) if previous else None,
                    history=lambda b: np.zeros(0, np.int32),
                )
            )
        return taken / steps


@pytest.mark.parametrize("with_logits, cost, pays", [(3, 0.2, True), (3, 0.6, False), (2, 0.01, False)])
def test_on_where_it_pays(with_logits: int, cost: float, pays: bool) -> None:
    engine = Engine("auto")
    assert engine.run(256, 4, with_logits, cost) == 1.0, "the table fills first"
    engine.run(512, 4, with_logits, cost)
    share = engine.run(6400, 4, with_logits, cost)
    assert share > 0.95 if pays else share < 0.05
    assert 0 < share < 1, "the other way is tried now and then"


def test_what_pays_depends_on_the_batch() -> None:
    engine = Engine("auto")
    for _ in range(4):
        engine.run(1000, 1, 3, 0.1)
        engine.run(1000, 32, 3, 0.9)
    assert engine.run(640, 1, 3, 0.1) > 0.8 and engine.run(640, 32, 3, 0.9) < 0.2


def test_a_change_is_followed() -> None:
    engine = Engine("auto")
    engine.run(4000, 1, 3, 0.1)
    engine.run(6400, 1, 3, 2.0)
    assert engine.run(640, 1, 3, 2.0) < 0.1


def test_steps_that_did_more_than_decode_are_not_compared() -> None:
    engine = Engine("auto")
    engine.run(2000, 1, 3, 5.0, previous=False)
    sums = [kind[:2] for kinds in engine.choice._blocks.values() for kind in kinds.values()]
    assert sums == [[0.0, 0.0]] * len(sums)


@pytest.mark.parametrize("recycle", ["on", "off"])
def test_as_asked_for(recycle: str) -> None:
    engine = Engine(recycle)
    assert engine.run(2000, 1, 2, 5.0) == (1.0 if recycle == "on" else 0.0)
