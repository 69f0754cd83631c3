"""What a draft pass, a verify pass and a plain decoding step cost, in seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

Seconds = NDArray[np.float64]


@dataclass(frozen=True)
class Prices:
    """Prices of one skip set on one machine. Every function takes and gives arrays.

    Attributes:
        draft: (batch) -> seconds of one draft pass over `batch` requests, one token each.
        verify: (batch, tokens) -> seconds of one step of the whole model over `batch` requests with `tokens` query
            tokens in all (each request's draft tokens and one more).
        plain: (batch) -> seconds of one step of plain decoding.
        per_round: seconds that a round with drafts costs besides its passes (bookkeeping, padding, lost overlap).
    """

    draft: Callable[[ArrayLike], Seconds]
    verify: Callable[[ArrayLike, ArrayLike], Seconds]
    plain: Callable[[ArrayLike], Seconds]
    per_round: float = 0.0

    @classmethod
    def of_times(
        cls,
        draft: Mapping[int, float],
        step: Mapping[int, float],
        plain: Mapping[int, float] | None = None,
        per_round: float = 0.0,
    ) -> Prices:
        """From measured times; between the measured points, and behind the last two, straight lines.

        Args:
            draft: batch -> seconds of a draft pass.
            step: query tokens in all -> seconds of a step of the whole model.
            plain: batch -> seconds of a plain step; by default `step` at one token per request.
            per_round: see the class.

        Raises:
            ValueError: a table is empty or holds a time that is no positive number.
        """
        step_line = _line(step, "step")
        return cls(
            draft=_line(draft, "draft"),
            verify=lambda batch, tokens: step_line(tokens),
            plain=_line(plain, "plain") if plain else step_line,
            per_round=per_round,
        )


def _line(times: Mapping[int, float], name: str) -> Callable[[ArrayLike], Seconds]:
    at = np.array(sorted(times), np.float64)
    seconds = np.array([times[int(x)] for x in at], np.float64)
    if not len(at) or not np.all(np.isfinite(seconds) & (seconds > 0)) or at[0] < 1:
        raise ValueError(f"prices: the table of {name} times must hold positive seconds by a positive number")
    slope = max(0.0, (seconds[-1] - seconds[-2]) / (at[-1] - at[-2])) if len(at) > 1 else 0.0

    def price(x: ArrayLike) -> Seconds:
        x = np.asarray(x, np.float64)
        return np.interp(x, at, seconds) + slope * np.maximum(x - at[-1], 0)

    return price
