"""How much time a search beside serving may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Allowance:
    """A share of the time that passes, saved up to a limit: what a search may spend without slowing serving by more.

    Args:
        share: of the time since the start that may be spent; 0.01 is 1 %.
        most: seconds that may be saved up, so that a long pause does not pay for a long search at once.
        clock: for tests.
    """

    def __init__(self, share: float = 0.01, most: float = 1.0, clock: Callable[[], float] = time.perf_counter) -> None:
        if not 0 < share < 1:
            raise ValueError(f"allowance: share must lie between 0 and 1, not {share}")
        self.share, self.most, self.clock = share, most, clock
        self.saved, self.seen = 0.0, clock()

    @property
    def seconds(self) -> float:
        """What may be spent now; negative while the last search is not paid for yet."""
        now = self.clock()
        self.saved = min(self.most, self.saved + self.share * (now - self.seen))
        self.seen = now
        return self.saved

    @contextmanager
    def spending(self) -> Iterator[float]:
        """The seconds that may be spent; what the block really takes is paid."""
        given, start = self.seconds, self.clock()
        try:
            yield given
        finally:
            self.saved -= self.clock() - start
