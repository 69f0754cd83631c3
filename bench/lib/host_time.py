"""`TimedCalls`: what calls take on the host, while a program runs that does not know of it."""

from __future__ import annotations

import functools
import statistics
import time
from collections import defaultdict
from typing import Any


class TimedCalls:
    """Seconds of every call, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def time(self, owner: Any, attribute: str, name: str | None = None) -> None:
        """From now on, time the calls of a function of a class or of an object."""
        original, of_name = getattr(owner, attribute), self.seconds[name or attribute]

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                of_name.append(time.perf_counter() - started)

        setattr(owner, attribute, call)

    def clear(self) -> None:
        for seconds in self.seconds.values():
            seconds.clear()

    def medians(self) -> dict[str, float]:
        """Microseconds, of what was called."""
        return {name: 1e6 * statistics.median(seconds) for name, seconds in self.seconds.items() if seconds}

    def worst(self) -> dict[str, float]:
        """Microseconds, of what was called."""
        return {name: 1e6 * max(seconds) for name, seconds in self.seconds.items() if seconds}
