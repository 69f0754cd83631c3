"""`Report`: a log line about what drafting brings, after some minutes of serving, when that changes, and daily."""

import logging
import math
import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from freedraft.step import Step

logger = logging.getLogger(__name__)

SECONDS, FEWEST_STEPS = 180.0, 500  # that one report covers at least
DAY = 86_400.0  # seconds
OFF, ON = 0.02, 0.05  # shares of decoded requests with drafts, below and above which drafting counts as off and on
SLOW = 0.97  # speedup below which the log warns


@dataclass
class _Sums:
    since: float  # seconds
    steps: int = 0
    requests: int = 0
    tokens: int = 0
    drafted: int = 0
    draft_tokens: int = 0
    accepted: int = 0
    compared: int = 0  # steps with an estimated speedup over plain decoding
    speedups: float = 0.0
    head_drafts: int = 0
    head_accepted: int = 0


class Report:
    """Sums up the steps of a method. below: the drafter that it is on top of, "" for none; alone: whether speedups are
    over that drafter alone."""

    clock = staticmethod(time.monotonic)

    def __init__(self, method: str, below: str = "", *, alone: bool = False) -> None:
        self._method, self._below = method + f"+{below}" * bool(below), below
        self._alone = f"'{below}' alone" if alone else "without drafts"
        self._reported, self._at = "", -math.inf  # the state that was last reported, and when
        self._sums: _Sums | None = None

    def add(self, step: Step, speedup: float) -> None:
        """speedup: see `Controller`."""
        sums = self._sums = self._sums or _Sums(self.clock())
        sums.steps += 1
        sums.requests += step.batch_size
        drafted = step.drafted.tolist()
        sums.tokens += sum(step.gained.tolist())
        sums.drafted += len(drafted) - drafted.count(0)
        sums.draft_tokens += sum(drafted)
        sums.accepted += sum(step.accepted.tolist())
        if not math.isnan(speedup):
            sums.speedups += speedup
            sums.compared += 1
        if sums.steps % FEWEST_STEPS == 0 and self.clock() - sums.since >= SECONDS:
            self._report(sums)
            self._sums = None

    def add_head(self, accepted: NDArray[np.int64]) -> None:
        """See `GuardedMethod.count_head`."""
        if self._sums is not None:
            self._sums.head_drafts += len(accepted)
            self._sums.head_accepted += int(accepted.sum())

    def _report(self, sums: _Sums) -> None:
        share = sums.drafted / max(sums.requests, 1)
        speedup = sums.speedups / sums.compared if sums.compared else math.nan
        off = share < (ON if self._reported == "off" else OFF)
        state = "off" if off else "slow" if speedup < SLOW else "on"
        if state == self._reported and self.clock() - self._at < DAY:
            return
        self._reported, self._at = state, self.clock()
        if off:
            brings = f"drafting is off: {1 - share:.0%} of requests had no draft ('freedraft top' shows why)"
        else:
            brings = f"{sums.tokens / sums.requests:.2f} tokens per step, "
            brings += f"{sums.accepted / max(sums.draft_tokens, 1):.0%} of draft tokens accepted"
            if sums.head_drafts:
                of_head = sums.head_accepted / sums.head_drafts
                brings = f"{brings.replace('draft', 'n-gram')}, {of_head:.2f} tokens of '{self._below}' per draft"
            if sums.compared:
                brings = f"about {speedup:.2f} times as fast as {self._alone}; {brings}"
        level = logging.WARNING if state == "slow" else logging.INFO
        minutes = (self.clock() - sums.since) / 60
        logger.log(level, "freedraft: %s, last %.0f minutes: %s", self._method, minutes, brings)
