"""`Costs`: learns the times of steps and draft passes, and acceptance; the drafter decides how much it drafts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from freedraft.cost.acceptance import Acceptance
from freedraft.cost.controller import Controller
from freedraft.cost.roofline import Roofline
from freedraft.cost.step_times import StepTimes
from freedraft.draft import DraftBatch
from freedraft.recipe import Recipe
from freedraft.step import Step

_ENOUGH = 3  # timed steps without drafts needed for a comparison


class Costs(Controller):
    """Lets a drafter that has its own policy draft as much as fits. roofline: initial step times; path: file to keep
    step times in; clock: seconds; other arguments: see `Controller`."""

    def __init__(
        self, roofline: Roofline, max_draft_tokens: int, widths: Sequence[int] | None = None, *,
        path: Path | None = None, clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        super().__init__(roofline.profile, max_draft_tokens, widths)
        self.times = StepTimes(roofline, path, clock)
        self.acceptance = Acceptance()
        self.context = 1.0  # mean tokens of the requests of the newest step
        self.clock = clock
        self._began = 0.0
        self._ended: float | None = None

    def learn(self, step: Step) -> None:
        now = self._began = self.clock()
        if step.previous is not None and self._ended is not None:
            self.times.update(*step.previous, self.context, now - self._ended)
        if step.batch_size:
            self.context = float(np.add.reduce(step.contexts, dtype=np.float64)) / step.batch_size
        self.acceptance.update(step)

    def plan(self, step: Step) -> int:
        return min(self.max_draft_tokens, int(step.capacities.max(initial=0)))

    def cut(self, *drafts: DraftBatch) -> None:
        self.acceptance.follow(*drafts)
        self.budget = drafts[0].draft_tokens

    def done(self, step: Step) -> None:
        self._ended = self.clock()
        self.times.save_if_due()

    def interrupt(self) -> None:
        self._ended = None
        self.acceptance.follow()

    def save(self) -> None:
        self.times.save()

    # -- times of steps and draft passes at the context of the present step --------------------------------------------

    def baseline_known(self, batch: int) -> bool:
        """Whether steps without drafts were timed often enough for comparisons."""
        tokens = batch if self.widths is None else batch * int(self.widths[0])
        return self.times.count(batch, tokens, self.context) >= _ENOUGH

    def step_seconds(self, batch: int, query_tokens: ArrayLike) -> NDArray[np.float64]:
        """By query tokens over the batch."""
        return self.times.seconds(batch, query_tokens, self.context)

    def pass_seconds(self, recipe: Recipe, batch: ArrayLike) -> NDArray[np.float64]:
        """By number of requests."""
        return self.times.pass_seconds(recipe, batch, self.context)

    def record_pass(self, recipe: Recipe, batch: int, seconds: float) -> None:
        self.times.update_pass(recipe, batch, self.context, seconds)

    def warm_up(self) -> None:
        self.acceptance.warm_up()
        StepTimes(self.times.roofline).update(1, 1, 1.0, 1.0)
