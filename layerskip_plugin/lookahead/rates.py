"""Results of drafting: fading acceptance rates by bin, and the record of a recipe."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from layerskip_plugin.rounds import Floats, Ints

BINS = 16
MAX_DRAFT_LEN = 64
MEMORY = 64.0  # rounds of a recipe after which a round's weight is 1/e
BIN_MEMORY = 500.0  # trials of a bin after which a trial's weight is 1/e
PRIOR_WEIGHT = 6.0  # weight of a prior, in trials or rounds


class BinnedRate:
    """Share of successes per bin. Old trials fade; the prior of a bin is the rate of all bins, and of that rate
    `prior`."""

    def __init__(self, prior: float) -> None:
        self.prior = prior
        self.trials, self.successes = np.zeros(BINS), np.zeros(BINS)

    def add(self, bins: NDArray[np.intp], success: NDArray[np.bool_]) -> None:
        """Count intp[N] trials with bool[N] outcomes."""
        new = np.bincount(bins, minlength=BINS)
        fade = np.exp(-new / BIN_MEMORY)
        self.trials = self.trials * fade + new
        self.successes = self.successes * fade + np.bincount(bins, weights=success, minlength=BINS)

    @property
    def mean(self) -> float:
        """The rate of all bins together."""
        return float((self.successes.sum() + PRIOR_WEIGHT * self.prior) / (self.trials.sum() + PRIOR_WEIGHT))

    @property
    def rates(self) -> NDArray[np.float64]:
        """float64 [BINS]."""
        return (self.successes + PRIOR_WEIGHT * self.mean) / (self.trials + PRIOR_WEIGHT)


class RecipeRecord:
    """Results of drafting with one recipe.

    Attributes:
        kind: of its tokens in `DraftBatch.kinds`.
        reached, verified, accepted: float64 [MAX_DRAFT_LEN], per place in the draft the share of rounds in which a
            token was drafted, verified, and accepted there.
        next_given: the probability that the next token is accepted, by the confidence in the present one.
    """

    def __init__(self, prior: float, kind: int) -> None:
        self.kind = kind
        self.reached = np.power(prior, np.arange(MAX_DRAFT_LEN), dtype=np.float64)
        self.verified, self.accepted = self.reached.copy(), prior * self.reached
        self.weight = PRIOR_WEIGHT
        self.next_given = BinnedRate(prior)

    def update(self, drafted: Ints, verified: Ints, accepted: Ints) -> None:
        """int32 [R] tokens drafted, verified and accepted, of R rounds."""
        places, new = np.arange(MAX_DRAFT_LEN), len(drafted)
        self.weight = min(self.weight * np.exp(-new / MEMORY), MEMORY) + new
        for share, tokens in ((self.reached, drafted), (self.verified, verified), (self.accepted, accepted)):
            share += ((tokens[:, None] > places).mean(0) - share) * (new / self.weight)


def to_bins(probability: Floats) -> NDArray[np.intp]:
    """Which of the `BINS` equal parts of [0, 1] each probability lies in."""
    return np.clip((probability * BINS).astype(np.intp), 0, BINS - 1)
