"""`Chains`: of each request's n-gram draft the likeliest path, which draft passes may check all at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from freedraft.compiled import compiled
from freedraft.draft import DraftBatch


class Chains(NamedTuple):
    """Tokens that may follow the root of each of B requests, K at most.

    Attributes:
        tokens: int32 [B, K].
        chances: float64 [B, K], that each is accepted with all before it, never rising; 0 behind the last one.
    """

    tokens: NDArray[np.int32]
    chances: NDArray[np.float64]


def likeliest(draft: DraftBatch, p: NDArray[np.float64], longest: int) -> Chains:
    """From each root down, always to the child with the best chance, as far as that is above 0.

    Args:
        p: float64 [B, N], the chance that each node is accepted; 0 where there is none.
        longest: K.
    """
    chains = Chains(np.zeros((draft.batch_size, longest), np.int32), np.zeros((draft.batch_size, longest)))
    _walk(draft.parents, draft.tokens, p, *chains)
    return chains


@compiled(nogil=True)
def _walk(parents, tokens, p, chain, chances):
    for b in range(len(p)):
        at = 0
        for depth in range(chain.shape[1]):
            best = 0
            for i in range(at + 1, p.shape[1]):  # children come behind their parent
                if parents[b, i] == at and p[b, i] > (p[b, best] if best else 0.0):
                    best = i
            if not best:
                break
            at = best
            chain[b, depth], chances[b, depth] = tokens[b, at], p[b, at]
