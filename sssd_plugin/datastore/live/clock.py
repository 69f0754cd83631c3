"""`SteadyClock`: the time of day, which a jump of the system's clock does not move while a server runs."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

logger = logging.getLogger("freedraft.datastore")

_JUMP_SECONDS = 60.0


def _elapsed() -> float:
    """Return seconds that a set clock does not change; those of a suspended machine count where the system knows."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class SteadyClock:
    """The time at the start, and what has passed since: ages are right though somebody sets the clock.

    Args:
        wall, elapsed: seconds.
    """

    def __init__(self, wall: Callable[[], float] = time.time, elapsed: Callable[[], float] = _elapsed) -> None:
        self._wall, self._elapsed = wall, elapsed
        self._offset = wall() - elapsed()
        self._said = False

    def milliseconds(self) -> int:
        """Return ms since 1970."""
        return int((self._elapsed() + self._offset) * 1000)

    def check(self) -> None:
        """Say it once if the system's clock has jumped."""
        jump = self._wall() - self._elapsed() - self._offset
        if abs(jump) > _JUMP_SECONDS and not self._said:
            self._said = True
            logger.warning(
                "freedraft: the system's clock jumped by %.0f s; live_max_age goes on by the clock as it was before: "
                "restart the server to go by the new one",
                jump,
            )
