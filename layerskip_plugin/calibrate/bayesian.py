"""Self-SD (Zhang et al. 2024): offline Bayesian optimisation of a skip set."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from layerskip_plugin.calibrate.host_model import Sample
from layerskip_plugin.calibrate.run import Run, bar
from layerskip_plugin.pass_times import PassTimes
from layerskip_plugin.selection.bit_search import BitSearch
from layerskip_plugin.skip_set import SkipSet

RANDOM = 10  # sets before the Gaussian process

Evaluate = Callable[[Sequence[SkipSet]], NDArray[np.float64]]  # acceptance of each set


def search(evaluate: Evaluate, space: BitSearch, iterations: int, times: PassTimes | None = None) -> SkipSet:
    """The best set after `iterations` evaluations: of most acceptance (sets of one size), or with `times` of least time
    per token (equation 1 of KNN-SSD)."""
    proposals, done = [space.uniform(), *(space.random() for _ in range(min(RANDOM, iterations) - 1))], 0
    while done < iterations:
        sets = list(dict.fromkeys(proposals))  # an exhausted space repeats some
        values = evaluate(sets)
        if times is not None:
            rates = np.array([times.best(s, float(a))[0] for s, a in zip(sets, values, strict=True)])
            # Relative to a step without drafts, in the range of a Gaussian process.
            values = -1 / (rates * times.verify(1))
        space.register(sets, values)
        done += len(sets)
        proposals = [space.bayesian()]
    return space.best[0]


def best_set(run: Run, sample: Sample, size: int | None, iterations: int) -> tuple[SkipSet, float]:
    """The best set, and its agreement. size: of the set; None: any, by time per token."""
    space = BitSearch(run.model.n_layers, run.model.fingerprint, size=size, seed=run.common.seed)
    with bar("evaluating", iterations) as advance:

        def evaluate(sets: Sequence[SkipSet]) -> NDArray[np.float64]:
            advance(len(sets))
            return run.model.scores(sets, sample)[0]

        best = search(evaluate, space, iterations, run.times if size is None else None)
    return best, float(run.model.scores([best], sample)[0][0])
