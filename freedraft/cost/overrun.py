"""`Overrun`: how much longer a step with draft passes takes than its parts say."""

from __future__ import annotations

import math

import numpy as np

RATE = 1 / 16  # Of the newest step against those before
FORGET = 1 / 512
"""Of what is known of steps with passes, in each step without: nothing else would ever doubt it where it keeps passes
from running."""
ENOUGH = 8
CLIP, MOST = 0.8, 0.4  # ln: a step further off counts as this far off; no overrun is taken for larger


class Overrun:
    """Passes and steps are timed each by itself. What a round takes between them, a cache that passes leave cold, and
    whatever is wrong with a part at present shows in the whole: that of steps with passes, against that of steps
    without, which cancels what both have in common."""

    def __init__(self) -> None:
        self._errors, self._seen = np.zeros(2), np.zeros(2)

    def update(self, passes: bool, predicted: float, seconds: float) -> None:
        """Record predicted and measured seconds of a step with or without draft passes."""
        if not (predicted > 0.0 and seconds > 0.0 and math.isfinite(seconds)):
            return
        error, kind = min(max(math.log(seconds / predicted), -CLIP), CLIP), int(passes)
        self._seen[kind] += 1
        self._errors[kind] += max(RATE, 1 / self._seen[kind]) * (error - self._errors[kind])
        if not passes:
            self._errors[1] += FORGET * (self._errors[0] - self._errors[1])

    @property
    def factor(self) -> float:
        """At least 1; 1 until it is known."""
        if self._seen.min() < ENOUGH:
            return 1.0
        return math.exp(min(max(float(self._errors[1] - self._errors[0]), 0.0), MOST))
