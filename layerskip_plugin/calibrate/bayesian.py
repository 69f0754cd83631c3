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

Evaluate = Callable[[Sequence[SkipSet]], NDArray[np.float64]]
RANDOM, BATCH = 10, 4  # random points before the Gaussian process; points per evaluation


def search(
    evaluate: Evaluate,
    space: BitSearch,
    iterations: int,
    times: PassTimes | None = None,
    progress: Callable[[int], object] = lambda new: None,
) -> SkipSet:
    """The best set after `iterations` evaluations, including those in `space`.

    Args:
        evaluate: acceptance of each set.
        times: to minimise time per token (equation 1 of KNN-SSD); None: maximise acceptance (of sets of one size).
        progress: called with the number of new evaluations.
    """

    def values(skips: list[SkipSet]) -> NDArray[np.float64]:
        acceptance = evaluate(skips)
        if times is None:
            return acceptance
        seconds = np.array([1 / times.best(s, float(a))[0] for s, a in zip(skips, acceptance, strict=True)])
        # Relative to a step without drafts, in the range of a Gaussian process.
        return -seconds / times.verify(1)

    done = len(space.values)
    while done < iterations:
        if done == 0:
            proposals = [space.uniform()]
        elif done < RANDOM:
            proposals = [space.random() for _ in range(min(BATCH, RANDOM - done, iterations - done))]
        else:
            proposals = [space.bayesian()]
        new = list(dict.fromkeys(proposals))  # an exhausted space repeats some
        space.register(new, values(new))
        done += len(new)
        progress(len(new))
    return space.best[0]


def best_set(run: Run, sample: Sample, size: int | None, iterations: int) -> tuple[SkipSet, float]:
    """The best set after `iterations` evaluations, and its agreement. size: maximise agreement at this size; None:
    minimise time per token at any size."""
    times = run.times if size is None else None
    space = BitSearch(run.model.n_layers, run.model.fingerprint, size=size, seed=run.common.seed)

    def evaluate(skips: Sequence[SkipSet]) -> NDArray[np.float64]:
        return run.model.scores(skips, sample)[0]

    with bar("evaluating", iterations) as advance:
        best = search(evaluate, space, iterations, times, advance)
    return best, float(evaluate([best])[0])
