"""Exploration: `ProbeSchedule` decides when, `Probes` of the controllers also what to try."""

from collections.abc import Hashable

import numpy as np
from numpy.typing import NDArray

PROBE_EVERY = 100  # steps between probes, at most
_PROBE_FIRST, _PROBE_GROWTH = 8, 1.125  # steps before the first probe of a kind
_PROBE_COST = 1.5  # longest probe, in steps without drafts
_IDLE_SHARE = 0.005  # share of time for drafting while nothing is verified
_MAX_IDLE = 64  # steps


class ProbeSchedule:
    """Intervals between probes that grow from `first` to `longest`, per kind of step."""

    def __init__(self, first: int, longest: int, growth: float = 2.0) -> None:
        self.first, self.longest, self.growth = first, longest, growth
        self._intervals: dict[Hashable, float] = {}
        self._waited: dict[Hashable, int] = {}

    def due(self, key: Hashable = None, *, eager: bool = True, longest: float | None = None) -> bool:
        """Whether to probe in this step; call once per step that could be a probe. eager: whether early probes are
        allowed, else the longest interval applies; longest: replaces the longest interval for this call."""
        longest = self.longest if longest is None else longest
        waited = self._waited.get(key, 0) + 1
        interval = min(self._intervals.get(key, float(self.first)), longest)
        if waited < (interval if eager else longest):
            self._waited[key] = waited
            return False
        self._waited[key] = 0
        self._intervals[key] = min(self.growth * interval, float(longest))
        return True

    def reset(self) -> None:
        """Restart with the first intervals."""
        self._waited.clear()
        self._intervals.clear()


class Probes(ProbeSchedule):
    """Probes of draft lengths other than the best, which keep step times fresh; and, while nothing is verified, rests
    between drafts that only measure what drafting would bring."""

    def __init__(self) -> None:
        super().__init__(_PROBE_FIRST, PROBE_EVERY, _PROBE_GROWTH)
        self.random = np.random.default_rng(0)
        self._rest = 0

    @staticmethod
    def affordable(seconds: NDArray[np.float64]) -> NDArray[np.intp]:
        """Indices of draft lengths that may be probed. seconds: step time by length, first without drafts."""
        return np.flatnonzero(seconds <= _PROBE_COST * seconds[0])

    def begin_rest(self, drafting: float, step: float) -> None:
        """Rest the drafter for some steps, by the seconds of drafting and of a step."""
        self._rest = min(int(max(drafting, 0.0) / (_IDLE_SHARE * max(step, 1e-6))), _MAX_IDLE)

    def take_rest(self) -> bool:
        """Whether the drafter rests in this step, which is counted."""
        self._rest -= 1
        return self._rest >= 0
