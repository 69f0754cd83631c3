"""`Report`: a line in the log about what drafting brings, after some minutes of serving and when that changes."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable

from freedraft.step import Step

logger = logging.getLogger(__name__)

SECONDS, FEWEST_STEPS = 180.0, 500  # that one report covers at least
OFF, ON = 0.02, 0.05  # shares of decoded requests with drafts, below and above which drafting counts as off and on


class Report:
    """Sums up steps. clock: seconds."""

    def __init__(self, method: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._method, self._clock = method, clock
        self._off: bool | None = None  # as it was last reported
        self._start()

    def add(self, step: Step, speedup: float) -> None:
        """A step has ended. speedup: see `Controller`."""
        self._steps += 1
        self._requests += step.batch_size
        self._tokens += int(step.gained.sum())
        self._drafted += int((step.drafted > 0).sum())
        self._speedups += speedup
        if self._steps % FEWEST_STEPS == 0 and self._clock() - self._since >= SECONDS:
            self._report()
            self._start()

    def _start(self) -> None:
        self._since = self._clock()
        self._steps = self._requests = self._tokens = self._drafted = 0
        self._speedups = 0.0

    def _report(self) -> None:
        share = self._drafted / max(self._requests, 1)
        off = share < (ON if self._off else OFF)
        if off == self._off:
            return
        self._off = off
        if off:
            brings = f"drafting is off: in {1 - share:.0%} of steps no draft was likely to bring more than it costs"
        else:
            speedup = self._speedups / self._steps
            ratio = "" if math.isnan(speedup) else f", an estimated {speedup:.2f} times plain decoding"
            brings = f"{self._tokens / self._requests:.2f} tokens per step and request{ratio}"
        minutes = (self._clock() - self._since) / 60
        logger.info("freedraft: %s, last %.0f minutes: %s", self._method, minutes, brings)
