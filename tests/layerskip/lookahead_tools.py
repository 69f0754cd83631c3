"""Costs that are known, and what verification says."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from freedraft.cost.acceptance import Acceptance
from layerskip_plugin.lookahead.cost import Cost
from layerskip_plugin.rounds import Outcome
from layerskip_plugin.skip_set import SkipSet

RECIPE = SkipSet(2, frozenset({1}), frozenset())


class KnownCosts:
    """Costs of a machine: draft passes by recipe, steps by query tokens."""

    def __init__(self, draft: float, step: Mapping[int, float]) -> None:
        self.draft, self.step, self.acceptance = draft, step, Acceptance()

    def step_seconds(self, batch: int, query_tokens: ArrayLike) -> NDArray[np.float64]:
        return np.interp(query_tokens, *map(list, (self.step.keys(), self.step.values())))

    def pass_seconds(self, recipe: SkipSet, batch: ArrayLike) -> NDArray[np.float64]:
        return np.full(np.shape(batch), self.draft)


def cost(
    draft: float, step: Mapping[int, float], recipes: Sequence[SkipSet] = (RECIPE,), *,
    widths: Sequence[int] | None = None, longest: int = 64,
) -> Cost:  # fmt: skip
    return Cost(KnownCosts(draft, step), recipes, longest, widths)


def outcome(
    ids: Sequence[str], drafted: NDArray[np.int32], accepted: NDArray[np.int32], top: NDArray[np.float32],
    entropy: NDArray[np.float32],
) -> Outcome:  # fmt: skip
    """What verification said of chains that were verified whole; top: [R, D, K]; entropy: [R, D]."""
    return Outcome(RECIPE, ids, drafted, drafted, accepted, accepted, top, entropy)
