"""`Measured`: the times of steps and draft passes, and acceptance, learnt while serving; `Head`: what is learnt of a
drafter that n-grams are on top of. They decide nothing."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from freedraft.cost.acceptance import Acceptance
from freedraft.cost.roofline import Roofline
from freedraft.cost.step_times import StepTimes
from freedraft.draft_model import Recipe
from freedraft.step import Step

_RATE, _MEMORY = 0.02, 0.98  # of what is learnt of a head, and of what goes on behind
_ENOUGH = 3  # timed steps without drafts needed for a comparison


class Measured:
    """Seconds are those at the context of the present step.

    Args:
        roofline: initial times; path: file to keep times of steps in; clock: seconds.

    Attributes:
        context: mean tokens of the requests of the newest step.
        began: when the tokens of the newest step came.
    """

    def __init__(
        self, roofline: Roofline, path: Path | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.times, self.acceptance, self.clock = StepTimes(roofline, path, clock), Acceptance(), clock
        self.context = 1.0
        self.began = 0.0
        self._ended: float | None = None

    def learn(self, step: Step) -> None:
        """Take the newest step: its time, if the one before ended in `launch`, and its outcome."""
        now = self.began = self.clock()
        if step.previous is not None and self._ended is not None:
            self.times.update(*step.previous, self.context, now - self._ended)
        self.accept(step)

    def accept(self, step: Step) -> None:
        """Take the newest step's outcome, without its time."""
        if step.batch_size:
            self.context = float(np.add.reduce(step.contexts, dtype=np.float64)) / step.batch_size
        self.acceptance.update(step)

    def launch(self) -> None:
        """The time of the next step begins."""
        self._ended = self.clock()
        self.times.save_if_due()

    def skip(self) -> None:
        """The time of the next step is not taken."""
        self._ended = None

    def interrupt(self) -> None:
        """Steps follow that nobody tells of."""
        self._ended = None
        self.acceptance.follow(None)

    def baseline_known(self, batch: int, widths: Sequence[int] | None = None) -> bool:
        """Whether steps without drafts were timed often enough for a comparison. widths: see `EngineContext`."""
        return self.times.count(batch, batch * (widths or (1,))[0], self.context) >= _ENOUGH

    def step_seconds(self, batch: int, query_tokens: ArrayLike) -> NDArray[np.float64]:
        """By query tokens over the batch."""
        return self.times.seconds(batch, query_tokens, self.context)

    def pass_seconds(self, recipe: Recipe, batch: ArrayLike) -> NDArray[np.float64]:
        """By number of requests."""
        return self.times.pass_seconds(recipe, batch, self.context)

    def warm_up(self) -> None:
        """Compile, or load from the cache, everything that a step calls."""
        self.acceptance.warm_up()
        StepTimes(self.times.roofline).update(1, 1, 1.0, 1.0)


class Head:
    """Each step verifies the head's K draft tokens first. n-grams bring what they add behind these: a learnt share of
    their own expectation, since both must agree.

    Attributes:
        length: K. accepted: of these, on average.
    """

    def __init__(self, length: int) -> None:
        self.length, self.accepted = length, 0.7 * length
        self.tails = np.full(2, 4.0)  # tokens behind a head's: gained, and expected

    @property
    def share(self) -> float:
        """Of the tokens that n-grams expect behind the head's, how many come."""
        return float(self.tails[0] / self.tails[1])

    def learn(self, accepted: float) -> None:
        """accepted: tokens of the head's draft in a step, on average."""
        self.accepted += _RATE * (accepted - self.accepted)

    def learn_tails(self, step: Step, expected: float) -> None:
        """expected: tokens per request of a step that n-grams had expected behind the head's."""
        gained = np.clip(step.gained - 1 - self.length, 0, None).mean()
        self.tails = _MEMORY * self.tails + (gained, expected)
