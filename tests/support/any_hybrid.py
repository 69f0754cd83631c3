"""The hybrid method, which gives draft passes to requests at random."""

from __future__ import annotations

from typing import Any

import numpy as np

from freedraft.cost.acceptance import PASS_KINDS
from freedraft.draft import DraftBatch
from freedraft.hybrid.method import HybridMethod
from freedraft.step import Step


def fix_times(times: Any, one_pass: float, one_step: float) -> None:
    """Let a pass and a step take so long, however busy the machine is."""
    update, update_pass = times.update, times.update_pass
    times.update = lambda batch, tokens, context, seconds: update(batch, tokens, context, one_step)
    times.update_pass = lambda recipe, batch, context, seconds: update_pass(recipe, batch, context, one_pass)


class AnyHybrid(HybridMethod):
    """Gives draft passes to requests at random. Attributes: by_kind: draft tokens of n-grams, and of passes."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.coins, self.by_kind = np.random.default_rng(1), [0, 0]
        fix_times(self.controller.measured.times, 0.001, 0.01)

    def _rows_of_passes(self, step: Step, draft: DraftBatch) -> Any:
        _, rest = super()._rows_of_passes(step, draft)  # what it would have been: its code runs, too
        allowed = self.passes.capacities(step) > 0
        rows = np.flatnonzero(allowed & (self.coins.random(len(allowed)) < 0.5))
        return rows if self.passes.begin_round(pays=True) else rows[:0], rest

    def proposals(self, step: Step, max_draft_len: int) -> Any:
        found = super().proposals(step, max_draft_len)
        for b, count in enumerate(found[0].counts.tolist()):
            if count > 1:
                self.by_kind[int(found[0].kinds[b, 1]) >= PASS_KINDS] += count - 1
        return found
