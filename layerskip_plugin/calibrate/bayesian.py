"""Self-SD (Zhang et al. 2024): offline Bayesian optimisation of a skip set."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from layerskip_plugin.calibrate.pass_times import PassTimes, tokens_per_time
from layerskip_plugin.selection.base import Evaluate
from layerskip_plugin.selection.bit_search import BitSearch
from layerskip_plugin.skip_set import SkipSet

RANDOM = 10
"""Random points before the Gaussian process is asked."""
MAX_LENGTH = 10
"""Tokens of a draft, at most."""


def seconds_per_token(skip: SkipSet, acceptance: float, times: PassTimes) -> float:
    """Time per verified token at the best draft length: equation 1 of KNN-SSD with measured pass times."""
    draft = times.draft(skip)
    return 1 / max(tokens_per_time(acceptance, draft, times.verify, d) for d in range(1, MAX_LENGTH + 1))


def search(
    evaluate: Evaluate,
    space: BitSearch,
    iterations: int,
    times: PassTimes | None = None,
    progress: Callable[[], object] = lambda: None,
    batch: int = 4,
) -> SkipSet:
    """The best set after `iterations` evaluations, those that `space` already holds included.

    Args:
        evaluate: acceptance of each set.
        space: the sets to search and their values; it can be saved and restored between calls.
        iterations: evaluations in all.
        times: minimise seconds per token; without them, maximise acceptance (of sets of one size).
        progress: called after each evaluation.
        batch: random points evaluated at once.
    """

    def values(skips: list[SkipSet]) -> NDArray[np.float64]:
        acceptance = evaluate(skips)
        if times is None:
            return acceptance
        seconds = np.array([seconds_per_token(s, float(a), times) for s, a in zip(skips, acceptance, strict=True)])
        # Relative to a step without drafts: seconds of very different size would be flat to a Gaussian process.
        return -seconds / times.verify(1)

    while (done := len(space.values)) < iterations:
        if done == 0:
            proposals = [space.uniform()]
        elif done < RANDOM:
            proposals = [space.random() for _ in range(min(batch, RANDOM - done, iterations - done))]
        else:
            proposals = [space.bayesian()]
        new = list(dict.fromkeys(s for s in proposals if s not in space.values)) or [space.mutated(space.best[0])]
        space.register(new, values(new))
        for _ in new:
            progress()
    return space.best[0]
