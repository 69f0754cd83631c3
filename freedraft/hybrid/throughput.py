"""`Throughput`: tokens per second that each request has gained of late."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

STEPS = 12
"""Steps after which an old one counts 1/e."""
_FADE = float(np.exp(-1 / STEPS))


class Throughput:
    """Running sums of tokens and seconds by request, older steps counting ever less."""

    def __init__(self) -> None:
        self._sums: dict[str, tuple[float, float]] = {}

    def __len__(self) -> int:
        return len(self._sums)

    def update(self, request_ids: Sequence[str], tokens: NDArray[np.integer], seconds: float) -> None:
        """Each of these requests gained `tokens` (int [B]) by a step of so many seconds."""
        for request_id, gained in zip(request_ids, tokens.tolist(), strict=True):
            before, passed = self._sums.get(request_id, (0.0, 0.0))
            self._sums[request_id] = _FADE * before + gained, _FADE * passed + seconds

    def of(self, request_ids: Iterable[str]) -> float:
        """Tokens per second of these requests together; those that are new count as 0."""
        sums = self._sums
        known = (sums[request_id] for request_id in request_ids if request_id in sums)
        return sum(tokens / seconds for tokens, seconds in known)

    def finish(self, request_id: str) -> None:
        """Forget a request."""
        self._sums.pop(request_id, None)
