"""`ProbeSchedule`: when to try what the estimates advise against, since what is never tried is never known."""

from __future__ import annotations

from collections.abc import Hashable


class ProbeSchedule:
    """Intervals between probes that grow from the first to the longest, each kind of step by itself."""

    def __init__(self, first: int, longest: int, growth: float = 2.0) -> None:
        self.first, self.longest, self.growth = first, longest, growth
        self._intervals: dict[Hashable, float] = {}
        self._waited: dict[Hashable, int] = {}

    def due(self, key: Hashable = None, *, eager: bool = True, longest: float | None = None) -> bool:
        """Whether the present step is to be a probe. To be asked once for each step that could be one. eager: whether
        early probes are worth their time; otherwise only the longest interval counts; longest: steps between probes at
        most, at present; None: as always."""
        longest = self.longest if longest is None else longest
        waited = self._waited.get(key, 0) + 1
        interval = min(self._intervals.get(key, float(self.first)), longest)
        if waited < (interval if eager else longest):
            self._waited[key] = waited
            return False
        self._waited[key] = 0
        self._intervals[key] = min(self.growth * interval, float(longest))
        return True

    def reset(self, key: Hashable = None) -> None:
        """Begin again with the first interval."""
        self._waited.pop(key, None)
        self._intervals.pop(key, None)
