"""Stop at the first token that the draft model is not sure of."""

from __future__ import annotations

import numpy as np

from layerskip_plugin.lookahead.base import Flags, Floats, Ints, Lookahead, unit


class Confidence(Lookahead):
    """Go on while the draft token's top-1 probability is at least `threshold`; the token below it is kept.

    Draft & Verify and SWIFT use .8, KnapSpec .7.
    """

    needs_top = 1

    def __init__(self, threshold: float = 0.7) -> None:
        self.threshold = unit("threshold", threshold)

    def should_continue(self, position: int, rows: Ints, top: Floats, entropy: Floats | None) -> Flags:
        if position + 1 >= self.max_draft_tokens:
            return np.zeros(len(rows), np.bool_)
        return top[:, 0] >= self.threshold
