"""`RecipeRecord`: what drafting with one recipe has brought, which the cost policy goes by."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from freedraft.cost.acceptance import PASS_KINDS
from layerskip_plugin.lookahead.base import Floats, Ints
from layerskip_plugin.lookahead.rates import BinnedRate

BINS = 16
MAX_DRAFT_LEN = 64
MEMORY = 64.0
"""Rounds of a request after which an old one counts 1/e."""
PRIOR_WEIGHT = 6.0


class RecipeRecord:
    """See above.

    Attributes:
        kind: what `DraftBatch.kinds` says of tokens that were drafted with it.
        reached, verified, accepted: float64 [MAX_DRAFT_LEN], per place in the draft the share of rounds in which a
            token was drafted there, in which one was verified there, and in which one was accepted there.
        next_given: the chance that a further token is accepted, by the confidence in the one before it.
    """

    def __init__(self, prior: float, kind: int = PASS_KINDS) -> None:
        self.kind = kind
        self.reached = np.array([prior**place for place in range(MAX_DRAFT_LEN)])
        self.verified, self.accepted = self.reached.copy(), prior * self.reached
        self.weight = PRIOR_WEIGHT
        # Pooled: bins behind which nothing was drafted yet count as like the others. At a fixed prior that does not pay
        # for a pass nothing would ever be drafted behind them.
        self.next_given = BinnedRate(np.full(BINS, prior), PRIOR_WEIGHT, pooled=True)

    def update(self, drafted: Ints, verified: Ints, accepted: Ints) -> None:
        """int32 [R] tokens drafted, verified and accepted, of R rounds."""
        places, new = np.arange(MAX_DRAFT_LEN), len(drafted)
        self.weight = min(self.weight * np.exp(-new / MEMORY), MEMORY) + new
        pairs = ((self.reached, drafted), (self.verified, verified), (self.accepted, accepted))
        for share, tokens in pairs:
            share += ((tokens[:, None] > places).mean(0) - share) * (new / self.weight)


def to_bins(probability: Floats) -> NDArray[np.intp]:
    """Which of the `BINS` equal parts of [0, 1] each probability lies in."""
    return np.clip((probability * BINS).astype(np.intp), 0, BINS - 1)
