"""Always the same number of draft tokens."""

from __future__ import annotations

import numpy as np

from layerskip_plugin.lookahead.base import Flags, Floats, Ints, Lookahead


class Fixed(Lookahead):
    """Draft `length` tokens, or as many as are allowed."""

    def __init__(self, length: int) -> None:
        if length < 1:
            raise ValueError(f"lookahead: length must be at least 1, not {length}")
        self.length = length

    def should_continue(self, position: int, rows: Ints, top: Floats, entropy: Floats | None) -> Flags:
        return np.full(len(rows), position + 1 < min(self.length, self.max_draft_tokens))
