"""Policies that learn nothing: a fixed number of tokens, a fixed threshold."""

from __future__ import annotations

import numpy as np

from layerskip_plugin.lookahead.base import Flags, Floats, Ints, Lookahead, unit


class Fixed(Lookahead):
    """Draft `length` tokens, or as many as are allowed."""

    def __init__(self, length: int) -> None:
        if length < 1:
            raise ValueError(f"lookahead: length must be at least 1, not {length}")
        self.length = length

    def expected_len(self) -> int:
        return min(self.length, self.max_draft_len)

    def should_continue(self, position: int, rows: Ints, top: Floats, entropy: Floats | None) -> Flags:
        return np.full(len(rows), position + 1 < min(self.length, self.max_draft_len))


class Confidence(Lookahead):
    """Go on while the draft token's top-1 probability is at least `threshold`; the token below it is kept.

    Draft & Verify and SWIFT use .8, KnapSpec .7.
    """

    needs_top = 1

    def __init__(self, threshold: float = 0.7) -> None:
        self.threshold = unit("threshold", threshold)

    def should_continue(self, position: int, rows: Ints, top: Floats, entropy: Floats | None) -> Flags:
        return (top[:, 0] >= self.threshold) & (position + 1 < self.max_draft_len)
