"""Random and Bayesian search over skip sets."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerskip_plugin.skip_set import SkipSet

POINTS = 256
"""Observations that the Gaussian process is fitted to, the newest ones: its price grows with their third power."""
SAMPLES = 2000


class BitSearch:
    """Proposes sets that skip `skipped` sublayers, or any number of them, and learns from their values.

    The Gaussian process sees every point as it was evaluated, as zeros and ones.

    Args:
        n_layers, model: of the sets.
        kept: sublayers that are never skipped.
        skipped: how many a set skips; None leaves it open.
        seed: of all randomness.

    Raises:
        ValueError: more are to be skipped than may be.
    """

    def __init__(
        self, n_layers: int, model: str = "", kept: Iterable[int] = (), skipped: int | None = None, seed: int = 0
    ) -> None:
        self.n_layers, self.model = n_layers, model
        self.free = np.array(sorted(set(range(2 * n_layers)) - set(kept)), np.intp)
        self.rng = np.random.default_rng(seed)
        self.resize(skipped)

    def resize(self, skipped: int | None) -> None:
        """From now on sets skip this many sublayers; what was learned of others is forgotten."""
        if skipped is not None and not 0 <= skipped <= len(self.free):
            raise ValueError(f"{skipped} sublayers cannot be skipped: {len(self.free)} of {2 * self.n_layers} may be")
        self.skipped = skipped
        self.values: dict[SkipSet, float] = {}

    def uniform(self) -> SkipSet:
        """Evenly spread over the sublayers that may be skipped."""
        count = len(self.free) // 2 if self.skipped is None else self.skipped
        places = ((np.arange(count) + 0.5) * len(self.free) / max(1, count)).astype(np.intp)
        return self._set(self.free[places])

    def random(self) -> SkipSet:
        """Drawn evenly from all sets of the right size."""
        count = int(self.rng.integers(1, len(self.free) // 2 + 2)) if self.skipped is None else self.skipped
        return self._set(self.rng.choice(self.free, min(count, len(self.free)), replace=False))

    def bayesian(self) -> SkipSet:
        """That of the largest upper confidence bound, by the library's Gaussian process over the observed points."""
        if len(self.values) < 2:
            return self.random()
        from bayes_opt.acquisition import UpperConfidenceBound
        from bayes_opt.target_space import TargetSpace
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import Matern

        space = TargetSpace(None, {f"{i:04d}": (0.0, 1.0) for i in self.free}, allow_duplicate_points=True)
        for skip, value in list(self.values.items())[-POINTS:]:
            space.register(np.array(skip.bits, np.float64)[self.free], value)
        kernel = Matern(nu=2.5, length_scale=np.sqrt(len(self.free)) / 2, length_scale_bounds=(0.3, 30.0))
        process = GaussianProcessRegressor(kernel, alpha=1e-3, normalize_y=True, n_restarts_optimizer=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            point = UpperConfidenceBound(kappa=1.0).suggest(
                process, space, n_random=SAMPLES, n_smart=1, random_state=int(self.rng.integers(2**31))
            )
        skip = self._rounded(point)
        return skip if skip not in self.values else self.mutated(skip)

    def mutated(self, skip: SkipSet) -> SkipSet:
        """`skip` with one sublayer exchanged for another one."""
        inside = [i for i in skip.sublayers if i in set(self.free.tolist())]
        outside = [i for i in self.free.tolist() if i not in set(inside)]
        if not inside or not outside:
            return self.random()
        gone, new = self.rng.choice(inside), self.rng.choice(outside)
        return self._set([i for i in skip.sublayers if i != gone] + [int(new)])

    def register(self, skips: Sequence[SkipSet], values: Sequence[float] | NDArray[np.float64]) -> None:
        """Learn the values of these sets; a set measured again takes the mean of both."""
        for skip, value in zip(skips, values, strict=True):
            old = self.values.pop(skip, None)
            self.values[skip] = float(value) if old is None else (old + float(value)) / 2

    @property
    def best(self) -> tuple[SkipSet, float]:
        """The observed set of largest value, with it."""
        return max(self.values.items(), key=lambda item: item[1])

    def state(self) -> list[Any]:
        """What was observed, for a file."""
        return [[list(skip.sublayers), value] for skip, value in self.values.items()]

    def restore(self, state: Iterable[Any]) -> None:
        """The inverse of `state`."""
        for sublayers, value in state:
            self.values[self._set(sublayers)] = float(value)

    def _rounded(self, point: NDArray[np.floating[Any]]) -> SkipSet:
        if self.skipped is None:
            return self._set(self.free[point > 0.5])
        return self._set(self.free[np.argsort(-point, kind="stable")[: self.skipped]])

    def _set(self, sublayers: Iterable[int] | NDArray[np.intp]) -> SkipSet:
        return SkipSet.of_sublayers((int(i) for i in sublayers), self.n_layers, self.model)
