"""The time that a search running beside serving may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class TimeBudget:
    """Accrues a share of elapsed time up to a limit, so that a search slows serving by no more than that share.

    Args:
        share: of the elapsed time that may be spent; 0.01 is 1 %.
        max_saved: seconds that may accrue, so that a long pause does not pay for a long search at once.
        clock: gives seconds; tests pass their own.
    """

    def __init__(
        self, share: float = 0.01, max_saved: float = 1.0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        if not 0 < share < 1:
            raise ValueError(f"time budget: share must lie between 0 and 1, not {share}")
        self.share, self.max_saved, self.clock = share, max_saved, clock
        self.saved, self.updated = 0.0, clock()

    @property
    def seconds(self) -> float:
        """Seconds that may be spent now; negative while the last search is not paid for yet."""
        now = self.clock()
        self.saved = min(self.max_saved, self.saved + self.share * (now - self.updated))
        self.updated = now
        return self.saved

    @contextmanager
    def spending(self) -> Iterator[float]:
        """Yield the seconds that may be spent, and charge what the block really takes."""
        available, start = self.seconds, self.clock()
        try:
            yield available
        finally:
            self.saved -= self.clock() - start
