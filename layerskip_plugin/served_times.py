"""`ServedTimes`: what draft passes and steps of the whole model take, measured while they are served."""

from __future__ import annotations

import time
from collections import deque

import numpy as np
from numpy.typing import ArrayLike, NDArray

Seconds = NDArray[np.float64]
SAMPLES = 48
ENOUGH = 3
STALE_S = 2.0
"""Of times older than this only the last `STALE` count beside newer ones."""
STALE = 2
PLAIN_SOON, PLAIN_EVERY = 4, 256
"""Steps with drafts before the first plain one between them, and before each later one at most."""


class ServedTimes:
    """Times of each kind and size, undisturbed: the fastest eighth of the last ones.

    What disturbs a measurement only ever makes it longer, and rarely all kinds alike: medians of steps taken in a busy
    moment, beside passes taken in a quiet one, would say that drafting pays where it does not. And what was measured in
    a busy moment must not be believed for ever after, as it would be where it keeps drafting off: old times give way to
    the first new ones.

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
    """Time by size: straight lines between the sizes that were measured, never falling, level outside."""

    def __init__(self) -> None:
        self._samples: dict[int, deque[float]] = {}
        self._newest: dict[int, float] = {}
        self._typical: dict[int, float] = {}
        self._line: tuple[Seconds, Seconds] = (np.zeros(1), np.ones(1))

    def __bool__(self) -> bool:
        return bool(self._samples)

    def add(self, size: int, seconds: float) -> None:
        samples = self._samples.setdefault(size, deque(maxlen=SAMPLES))
        now = time.monotonic()
        if now > self._newest.get(size, now) + STALE_S:
            while len(samples) > STALE:
                samples.popleft()
        self._newest[size] = now
        samples.append(seconds)
        self._typical[size] = sorted(samples)[len(samples) // 8]
        sizes = sorted(self._typical)
        times = np.array([self._typical[s] for s in sizes])
        self._line = np.array(sizes, np.float64), np.maximum.accumulate(times)

    def count(self, size: int) -> int:
        return len(self._samples.get(size, ()))

    def at(self, size: ArrayLike) -> Seconds:
        return np.interp(np.asarray(size, np.float64), *self._line)


class PlainTurns:
    """Which steps are to be plain where all others draft, so that the price of plain decoding stays known.

    Often at first, when the first times measured were those of a cold engine, then ever more rarely.
    """

    def __init__(self) -> None:
        self._left: dict[int, tuple[int, int]] = {}

    def due(self, batch: int) -> bool:
        """Asked once for each step of `batch` requests that could draft."""
        left, interval = self._left.get(batch, (PLAIN_SOON, PLAIN_SOON))
        if left == 0:
            interval = min(2 * interval, PLAIN_EVERY)
            self._left[batch] = interval, interval
            return True
        self._left[batch] = left - 1, interval
        return False
