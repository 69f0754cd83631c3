"""`Chains`: of each request's n-gram draft the likeliest path, which draft passes may check all at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from freedraft.draft import DraftBatch


class Chains(NamedTuple):
    """Tokens that may follow the root of each of B requests, K at most.

    Attributes:
        tokens: int32 [B, K].
        chances: float64 [B, K], that each is accepted with all before it, never rising; 0 behind the last one.
    """

    tokens: NDArray[np.int32]
    chances: NDArray[np.float64]

    def of(self, rows: NDArray[np.intp]) -> Chains:
        """Those of the requests at `rows`, intp [R]."""
        return Chains(self.tokens[rows], self.chances[rows])


def likeliest(draft: DraftBatch, p: NDArray[np.float64]) -> Chains:
    """From each root down, always to the child with the best chance, as far as that is above 0.

    Args:
        p: float64 [B, N], the chance that each node is accepted; 0 where there is none.
    """
    batch, longest = draft.batch_size, int(np.where(p > 0, draft.depths, 0).max(initial=0))
    chains = Chains(np.zeros((batch, longest), np.int32), np.zeros((batch, longest)))
    rows, at = np.arange(batch), np.zeros((batch, 1), np.int32)
    for depth in range(longest):
        chance = np.where(draft.parents == at, p, 0.0)
        best = chance.argmax(1)
        chains.tokens[:, depth], chains.chances[:, depth] = draft.tokens[rows, best], chance[rows, best]
        at = np.where(chance[rows, best] > 0, best, -2)[:, None]  # nobody's child
    return chains
