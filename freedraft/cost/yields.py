"""Tokens per step by the number of draft tokens that each request verifies, learnt while serving.

Of chains, every step says something of all shorter ones: how deep drafts were accepted. Of trees it does not, as a
smaller tree is no part of a chain; there, what is learnt of one size corrects the others by a common factor.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from freedraft.compiled import compiled
from freedraft.cost.explain import TOKENS_PER_STEP, expected_tokens

# Tokens per step by nodes: SSSD's chains on recorded answers of Llama-3.1-8B (bench/replay.py)
CHAIN_TOKENS_PER_STEP = {1: 1.0, 2: 1.307, 3: 1.425, 5: 1.491, 9: 1.52, 17: 1.527, 33: 1.529}
_MEMORY_REQUESTS, _MEMORY_STEPS = 384.0, 64.0  # that chances of acceptance are an average of, the more of the two
_PRIOR = 16.0  # requests that what is known beforehand counts as


class Yields(Protocol):
    """What draft tokens bring."""

    def record(self, scheduled: NDArray[np.int32], accepted: NDArray[np.int32]) -> None:
        """What became of the draft tokens of B requests. scheduled: int32 [B], how many each was to verify, those
        included for which there was no draft; accepted: int32 [B], how many were accepted."""

    def tokens(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        """Expected tokens per step and request, for each draft length."""


class ChainYields:
    """Those of chains, from the share of requests that accepted each depth. max_draft_tokens: K."""

    def __init__(self, max_draft_tokens: int) -> None:
        # By depth: requests whose draft tokens before it were accepted, and of these, those where it was, too.
        nodes = np.arange(1, max_draft_tokens + 2)
        shares = np.append(1.0, np.diff(expected_tokens(nodes, CHAIN_TOKENS_PER_STEP)))
        self._tried = np.full(max_draft_tokens, _PRIOR)
        self._accepted = _PRIOR * shares[1:] / np.maximum(shares[:-1], 1e-9)

    def record(self, scheduled: NDArray[np.int32], accepted: NDArray[np.int32]) -> None:
        _record(scheduled, accepted, self._tried, self._accepted)

    def tokens(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        shares = np.cumprod(self._accepted / self._tried)
        found: NDArray[np.float64] = np.concatenate([[1.0], 1.0 + np.cumsum(shares)])[lengths]
        return found


class TreeYields:
    """Those of trees, from the tokens that trees of each size have brought. max_draft_tokens: K."""

    def __init__(self, max_draft_tokens: int) -> None:
        self._prior = expected_tokens(np.arange(1, max_draft_tokens + 2), TOKENS_PER_STEP) - 1.0
        self._requests = np.zeros(max_draft_tokens + 1)
        self._accepted = np.zeros(max_draft_tokens + 1)

    def record(self, scheduled: NDArray[np.int32], accepted: NDArray[np.int32]) -> None:
        """As `Yields.record`; of sizes other than the largest of a step nothing is learnt: the scheduler cut them."""
        size = int(scheduled.max(initial=0))
        now = scheduled == size
        count = int(now.sum()) if size else 0
        if count:
            keep = np.exp(-min(count / _MEMORY_REQUESTS, 1.0 / _MEMORY_STEPS))
            self._requests[size] = keep * self._requests[size] + count
            self._accepted[size] = keep * self._accepted[size] + float(accepted[now].sum())

    def tokens(self, lengths: NDArray[np.int64]) -> NDArray[np.float64]:
        known = _PRIOR * self._prior[-1]
        factor = (known + self._accepted.sum()) / (known + (self._requests * self._prior).sum())
        gains = _PRIOR * factor * self._prior + self._accepted
        found: NDArray[np.float64] = (1.0 + gains / (_PRIOR + self._requests))[lengths]
        return found


@compiled
def _record(scheduled, accepted, tried, good):
    """See `ChainYields`. tried, good: float64 [K], by depth, changed in place."""
    for depth in range(len(tried)):
        now_tried, now_good = 0, 0
        for b in range(len(scheduled)):
            if scheduled[b] > depth and accepted[b] >= depth:
                now_tried += 1
                now_good += accepted[b] > depth
        if now_tried > 0:
            keep = np.exp(-min(now_tried / _MEMORY_REQUESTS, 1.0 / _MEMORY_STEPS))
            tried[depth] = keep * tried[depth] + now_tried
            good[depth] = keep * good[depth] + now_good
