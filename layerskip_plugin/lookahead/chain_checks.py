"""`ChainChecks`: what it saves a round if its first draft pass reads n-gram chains with the roots."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerskip_plugin.lookahead.base import Ints

MEMORY, PRIOR_WEIGHT = 0.98, 10.0
"""Share of older checks that each new one leaves, and tokens that the first belief counts for."""


class ChainChecks:
    """How often drafts say what a chain does, by how often the target was expected to."""

    def __init__(self) -> None:
        self._agreed, self._expected = PRIOR_WEIGHT, PRIOR_WEIGHT

    def saved(
        self,
        chances: NDArray[np.float64],
        need: NDArray[Any],
        pass_seconds: Callable[[NDArray[np.int64]], NDArray[np.float64]],
        room: int,
    ) -> NDArray[np.float64]:
        """Seconds by which a round over the first 1 .. R requests is shorter if its first pass checks the best number
        of tokens of each chain, up to 1 .. K.

        Args:
            chances: float64 [R, K], that the target accepts a chain so far, never rising; 0 behind its end.
            need: [K], the chance that a request needs the pass behind 1 .. K tokens.
            pass_seconds: of a pass, by its tokens.
            room: most tokens of a pass, roots included.

        Returns:
            float64 [R, K].
        """
        n = np.arange(1, len(chances) + 1)[:, None]
        agreed = np.minimum(self._agreed / self._expected * chances, 1)
        # A pass is saved where nobody needs it any more.
        fewer = np.cumprod(1 - need * (1 - agreed), 0) - (1 - need) ** n
        tokens = (chances > 0).cumsum(0).cumsum(1)
        one, more = pass_seconds(np.stack((n + 0 * tokens, n + tokens)))
        gain = np.where(n + tokens <= room, one * fewer.cumsum(1) - (more - one), 0.0)
        return np.maximum.accumulate(np.maximum(gain, 0.0), 1)

    def record(self, chances: NDArray[np.float64], lengths: Ints, agreed: NDArray[Any]) -> None:
        """Of chains with these chances so many tokens were checked, and so many were the draft's own, too: float64
        [R, K], int32 [R], int [R]."""
        expected = np.where(np.arange(chances.shape[1]) < lengths[:, None], chances, 0.0).sum()
        self._agreed = MEMORY * self._agreed + float(agreed.sum())
        self._expected = MEMORY * self._expected + float(expected)
