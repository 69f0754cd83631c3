"""`RecycleChoice`: whether recycled logits are kept and drafted from, by what they bring."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from freedraft.method import Step

Recycle = Literal["auto", "on", "off"]

BLOCK = 32  # steps that are timed together
FIRST_BLOCKS = 8  # with logits, before anything is compared: the table fills
KNOWN_BLOCKS = 4  # of either kind, before one is preferred
TRY_EVERY = 32  # blocks, of which one is of the other kind
DECAY = 0.9


class RecycleChoice:
    """With "auto", blocks of steps with and without logits are compared by tokens per second, for batches of each size
    (powers of two) apart.

    Args:
        recycle: as asked for.
        clock: seconds.
    """

    def __init__(self, recycle: Recycle, clock: Callable[[], float] = time.perf_counter) -> None:
        self.on = recycle != "off"
        self._auto = recycle == "auto"
        self._clock = clock
        self._ended: float | None = None
        self._size = 0
        self._left = FIRST_BLOCKS * BLOCK
        self._blocks: dict[int, dict[bool, list[float]]] = {}  # by size and kind: tokens, seconds, blocks
        self._number = 0

    def update(self, step: Step) -> None:
        """A step has ended, and the next one is about to be drafted."""
        if not self._auto:
            return
        now, size = self._clock(), step.batch_size.bit_length()
        known = self._blocks.setdefault(size, {True: [0.0, 0.0, 0], False: [0.0, 0.0, 0]})
        if step.previous is not None and self._ended is not None and size == self._size:
            sums = known[self.on]
            sums[0] += float(step.gained.sum())
            sums[1] += now - self._ended
        self._ended, self._size = now, size
        self._left -= 1
        if self._left <= 0:
            self._next_block(known)

    def _next_block(self, known: dict[bool, list[float]]) -> None:
        self._left = BLOCK
        self._number += 1
        sums = known[self.on]
        sums[2] += 1
        for i in range(2):
            sums[i] *= DECAY
        with_logits, without = known[True], known[False]
        if min(with_logits[2], without[2]) < KNOWN_BLOCKS:
            self.on = with_logits[2] <= without[2]
            return
        better = with_logits[0] * without[1] >= without[0] * with_logits[1]
        self.on = better if self._number % TRY_EVERY else not better
