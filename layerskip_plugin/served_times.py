"""`ServedTimes`: what draft passes and steps of the whole model take, measured while they are served."""

from __future__ import annotations

from collections import deque
from statistics import median

import numpy as np
from numpy.typing import ArrayLike, NDArray

Seconds = NDArray[np.float64]
SAMPLES = 9
ENOUGH = 3


class ServedTimes:
    """Medians of the last times of each kind and size.

    Where nothing was measured yet it guesses low: a step of more tokens costs what the largest measured one does, a
    draft pass its share of a plain step. So what is not known gets tried, and is known then.
    """

    def __init__(self, kept_share: float) -> None:
        """
        Args:
            kept_share: weight bytes that a draft pass reads, by those of the whole model.
        """
        self._kept = kept_share
        self._draft = _Table()
        self._steps = _Table()
        self._plain = _Table()
        self._rounds = _Table()

    def note_draft(self, batch: int, seconds: float) -> None:
        """One draft pass over `batch` requests."""
        self._draft.add(batch, seconds)

    def note_round(self, seconds: float) -> None:
        """What a round with drafts took besides its passes."""
        self._rounds.add(1, seconds)

    def note_step(self, batch: int, tokens: int, seconds: float) -> None:
        """One step over `batch` requests with `tokens` query tokens in all, from one draft's end to the next one."""
        self._steps.add(tokens, seconds)
        if tokens == batch:
            self._plain.add(batch, seconds)

    def plain_known(self, batch: int) -> bool:
        """Whether plain steps of this batch were measured often enough to compare anything with."""
        return self._plain.count(batch) >= ENOUGH

    def draft(self, batch: ArrayLike) -> Seconds:
        """Seconds of one draft pass over so many requests."""
        if self._draft:
            return self._draft.at(batch)
        return self._kept * self.plain(batch)

    def verify(self, batch: ArrayLike, tokens: ArrayLike) -> Seconds:
        """Seconds of one step of the whole model with so many query tokens in all."""
        return self._steps.at(np.maximum(tokens, batch))

    def plain(self, batch: ArrayLike) -> Seconds:
        """Seconds of one plain step."""
        return (self._plain or self._steps).at(batch)

    @property
    def per_round(self) -> float:
        """Seconds of a round besides its passes."""
        return float(self._rounds.at(1)) if self._rounds else 0.0


class _Table:
    """Median time by size: straight lines between the sizes that were measured, never falling, level outside."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}
        self._line: tuple[Seconds, Seconds] = (np.zeros(1), np.ones(1))

    def __bool__(self) -> bool:
        return bool(self._samples)

    def add(self, size: int, seconds: float) -> None:
        samples = self._samples.setdefault(size, deque(maxlen=SAMPLES))
        samples.append(seconds)
        self._medians[size] = median(samples)
        sizes = sorted(self._medians)
        times = np.array([self._medians[s] for s in sizes])
        self._line = np.array(sizes, np.float64), np.maximum.accumulate(times)

    def count(self, size: int) -> int:
        return len(self._samples.get(size, ()))

    def at(self, size: ArrayLike) -> Seconds:
        return np.interp(np.asarray(size, np.float64), *self._line)
