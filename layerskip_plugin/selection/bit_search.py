"""`BitSearch`: random and Bayesian proposals of skip sets."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerskip_plugin.skip_set import SkipSet

MAX_OBSERVATIONS = 256  # of the fit of the Gaussian process, which has cubic cost
SAMPLES, PARENTS = 200, 8


def evenly_spread(sublayers: NDArray[np.intp], count: int) -> NDArray[np.intp]:
    return sublayers[((np.arange(count) + 0.5) * len(sublayers) / max(1, count)).astype(np.intp)]


class BitSearch:
    """Proposes sets that skip `size` sublayers, never protected ones, and learns from their values. Raises ValueError
    if `size` exceeds the number of all others."""

    def __init__(self, n_layers: int, size: int, model: str = "", protected: Iterable[int] = ()) -> None:
        self.n_layers, self.model, self.size = n_layers, model, size
        self.skippable = np.array(sorted(set(range(2 * n_layers)) - set(protected)), np.intp)
        if not 0 <= size <= len(self.skippable):
            raise ValueError(f"{size} sublayers cannot be skipped: {len(self.skippable)} of {2 * n_layers} may be")
        self.rng = np.random.default_rng(0)
        self.values: dict[SkipSet, float] = {}
        self.kernel: Any = None
        self.fitted = 0

    def uniform(self) -> SkipSet:
        return self._skip(evenly_spread(self.skippable, self.size))

    def random(self) -> SkipSet:
        return self._skip(self.skippable[self._draw(1)[0]])

    def bayesian(self) -> SkipSet:
        """The new set of largest upper confidence bound, among random ones and neighbours of the best observed; the
        library itself would maximise over the unit cube."""
        if len(self.values) < 2:
            return self.random()
        from bayes_opt.acquisition import UpperConfidenceBound

        best = self._points(sorted(self.values, key=self.values.__getitem__)[-PARENTS:]) > 0
        near = self._neighbours(best[np.arange(SAMPLES) % len(best)])
        proposals = np.unique(np.concatenate([self._draw(SAMPLES), near, self._neighbours(near)]), axis=0)
        mean, deviation = self._process().predict(proposals.astype(np.float64), return_std=True)
        for i in np.argsort(-UpperConfidenceBound(kappa=1.0).base_acq(mean, deviation), kind="stable"):
            skip = self._skip(self.skippable[proposals[i]])
            if skip not in self.values:
                return skip
        return self.random()

    def register(self, skips: Sequence[SkipSet], values: Sequence[float] | NDArray[np.float64]) -> None:
        """Add the values of these sets; for a set measured again, the mean of both values."""
        for skip, value in zip(skips, values, strict=True):
            old = self.values.pop(skip, None)
            self.values[skip] = float(value) if old is None else (old + float(value)) / 2

    def _draw(self, count: int) -> NDArray[np.bool_]:
        return self.rng.random((count, len(self.skippable))).argsort(1).argsort(1) < self.size

    def _neighbours(self, sets: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """bool[N, skippable]: each set with one sublayer in place of another."""
        out, rows, draws = sets.copy(), np.arange(len(sets)), self.rng.random(sets.shape)
        if 0 < self.size < sets.shape[1]:
            out[rows, np.where(sets, draws, -1.0).argmax(1)] = False
            out[rows, np.where(sets, -1.0, draws).argmax(1)] = True
        return out

    def _process(self) -> Any:
        """The Gaussian process of the newest observations; its length scale is refitted when they have grown by
        half."""
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import Matern, WhiteKernel

        observations = list(self.values.items())[-MAX_OBSERVATIONS:]
        fit = self.kernel is None or len(self.values) >= 1.5 * self.fitted
        kernel = self.kernel or Matern(3.0, (0.5, 30.0), nu=2.5) + WhiteKernel(0.1, (1e-4, 1.0))
        process = GaussianProcessRegressor(kernel, normalize_y=True, optimizer="fmin_l_bfgs_b" if fit else None)
        with warnings.catch_warnings():
            # A length scale at its bound is a valid fit.
            warnings.simplefilter("ignore")
            process.fit(self._points([skip for skip, _ in observations]), [value for _, value in observations])
        if fit:
            self.kernel, self.fitted = process.kernel_, len(self.values)
        return process

    def _points(self, skips: Sequence[SkipSet]) -> NDArray[np.float64]:
        return np.array([skip.bits for skip in skips], np.float64)[:, self.skippable]

    def _skip(self, sublayers: Iterable[int] | NDArray[np.intp]) -> SkipSet:
        return SkipSet.of_sublayers(sublayers, self.n_layers, self.model)
