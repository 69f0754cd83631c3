"""Acceptance rates by bin, with forgetting."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class BinnedRate:
    """Share of successes in each bin; old trials fade, and a prior stands in for those never made.

    Args:
        prior: float64[bins], the rate believed before any trial.
        weight: trials that the prior counts for.
        memory: trials of one bin after which an old one counts 1/e.
        pooled: the prior of each bin follows the rate of all bins together.
    """

    def __init__(
        self, prior: NDArray[np.float64], weight: float, memory: float = 500.0, *, pooled: bool = False
    ) -> None:
        self.prior, self.weight, self.memory = np.asarray(prior, np.float64), weight, memory
        self.pooled = pooled
        self.trials, self.successes = np.zeros(len(self.prior)), np.zeros(len(self.prior))

    def add(self, bins: NDArray[np.intp], success: NDArray[np.bool_]) -> None:
        """Count intp[N] trials with bool[N] outcomes."""
        size = len(self.prior)
        new = np.bincount(bins, minlength=size)
        fade = np.exp(-new / self.memory)
        self.trials = self.trials * fade + new
        self.successes = self.successes * fade + np.bincount(bins, weights=success, minlength=size)

    @property
    def mean(self) -> float:
        """The rate of all bins together, drawn to the first one's prior."""
        return float((self.successes.sum() + self.weight * self.prior[0]) / (self.trials.sum() + self.weight))

    @property
    def rates(self) -> NDArray[np.float64]:
        """float64[bins]."""
        prior = self.prior
        if self.pooled:
            prior = (self.successes.sum() + self.weight * prior) / (self.trials.sum() + self.weight)
        return (self.successes + self.weight * prior) / (self.trials + self.weight)
