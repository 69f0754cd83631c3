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
SAMPLES = 200
PARENTS = 8


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
        self.kernel: Any = None
        self.fitted = 0

    def uniform(self) -> SkipSet:
        """Evenly spread over the sublayers that may be skipped."""
        count = len(self.free) // 2 if self.skipped is None else self.skipped
        places = ((np.arange(count) + 0.5) * len(self.free) / max(1, count)).astype(np.intp)
        return self._set(self.free[places])

    def random(self) -> SkipSet:
        """Drawn evenly from all sets of the right size; of open size, up to half of what may be skipped."""
        return self._of(self._drawn(1)[0])

    def bayesian(self) -> SkipSet:
        """The new set of largest upper confidence bound, of random ones and neighbours of the best observed.

        The library maximises over the unit cube; here its acquisition function is asked about sets only, since those
        are all that can be evaluated.
        """
        if len(self.values) < 2:
            return self.random()
        from bayes_opt.acquisition import UpperConfidenceBound

        best = self._points(sorted(self.values, key=self.values.__getitem__)[-PARENTS:]) > 0
        near = self._neighbours(best[np.arange(SAMPLES) % len(best)])
        drawn = np.unique(np.concatenate([self._drawn(SAMPLES), near, self._neighbours(near)]), axis=0)
        mean, deviation = self._process().predict(drawn.astype(np.float64), return_std=True)
        # Those observed already come last in question.
        for i in np.argsort(-UpperConfidenceBound(kappa=1.0).base_acq(mean, deviation), kind="stable"):
            skip = self._of(drawn[i])
            if skip not in self.values:
                return skip
        return self.random()

    def mutated(self, skip: SkipSet) -> SkipSet:
        """`skip` with one sublayer exchanged for another one; where any size will do, one more or one less."""
        return self._of(self._neighbours(self._points([skip]) > 0)[0])

    def _drawn(self, count: int) -> NDArray[np.bool_]:
        """bool[count, free] random sets."""
        width = len(self.free)
        rank = self.rng.random((count, width)).argsort(1).argsort(1)
        if self.skipped is not None:
            return rank < self.skipped
        return rank < self.rng.integers(1, width // 2 + 2, (count, 1))

    def _neighbours(self, sets: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """bool[N, free]: each set with one change."""
        rows, out = np.arange(len(sets)), sets.copy()
        luck = self.rng.random(sets.shape)
        gone, new = np.where(sets, luck, -1.0).argmax(1), np.where(sets, -1.0, luck).argmax(1)
        able = sets.any(1) & ~sets.all(1)
        swap = able if self.skipped is not None else able & (self.rng.random(len(sets)) < 0.3)
        out[rows[swap], gone[swap]], out[rows[swap], new[swap]] = False, True
        if self.skipped is None:
            flip = rows[~swap]
            out[flip, luck[flip].argmax(1)] ^= True
        return out

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

    def _process(self) -> Any:
        """The Gaussian process of the newest observations; its length scale is fitted anew as they grow by half."""
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import Matern, WhiteKernel

        held = list(self.values.items())[-POINTS:]
        fit = self.kernel is None or len(self.values) >= 1.5 * self.fitted
        kernel = self.kernel or Matern(3.0, (0.5, 30.0), nu=2.5) + WhiteKernel(0.1, (1e-4, 1.0))
        process = GaussianProcessRegressor(kernel, normalize_y=True, optimizer="fmin_l_bfgs_b" if fit else None)
        with warnings.catch_warnings():
            # A length scale at its bound is one of the answers.
            warnings.simplefilter("ignore")
            process.fit(self._points([skip for skip, _ in held]), [value for _, value in held])
        if fit:
            self.kernel, self.fitted = process.kernel_, len(self.values)
        return process

    def _of(self, bits: NDArray[np.bool_]) -> SkipSet:
        return self._set(self.free[bits])

    def _points(self, skips: Sequence[SkipSet]) -> NDArray[np.float64]:
        return np.array([skip.bits for skip in skips], np.float64)[:, self.free]

    def _set(self, sublayers: Iterable[int] | NDArray[np.intp]) -> SkipSet:
        return SkipSet.of_sublayers((int(i) for i in sublayers), self.n_layers, self.model)
