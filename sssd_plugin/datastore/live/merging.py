"""`MergeThread`: the background thread of a live datastore, which merges runs and frees those that nobody sees."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sssd_plugin.datastore.index.runs import Run, merged, release

logger = logging.getLogger("freedraft.datastore")

NICE = 10
_RELEASE_SECONDS = 1.0
_RELEASED_TOKENS = 1 << 16  # smaller runs are unmapped in no time


@dataclass(slots=True, eq=False)
class Merge:
    """Runs to replace by one.

    Attributes:
        owner: whose runs they are; nothing to the thread.
        inputs: consecutive runs, oldest first.
        cut: tokens at the beginning of the first run that are dropped.
    """

    owner: Any
    inputs: list[Run]
    cut: int
    result: Run | None = None


class MergeThread:
    """Merges in compiled code that leaves the GIL alone. The thread starts with its first task.

    Args:
        vocab_size: token ids are below it.
        on_merged: called in the thread with each merge that is done.

    Attributes:
        failed: a merge failed, for instance for lack of memory; the thread has ended and no more are done.
        merges, seconds, longest: merges done, and what they took, together and at most.
    """

    def __init__(self, vocab_size: int, on_merged: Callable[[Merge], None]) -> None:
        self._vocab_size, self._on_merged = vocab_size, on_merged
        self._tasks: queue.SimpleQueue[Merge | list[Run] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self.failed = False
        self.merges, self.seconds, self.longest = 0, 0.0, 0.0

    def submit(self, task: Merge | list[Run]) -> None:
        """Give the thread a merge to do, or runs to free."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="freedraft-live", daemon=True)
            self._thread.start()
        self._tasks.put(task)

    def release(self, runs: list[Run]) -> None:
        """Free these runs once nobody holds them; who sees them still may go on."""
        large = [run for run in runs if run.n >= _RELEASED_TOKENS]
        if large:
            self.submit(large)

    def close(self) -> None:
        """Stop the thread after what it was given; may be called twice."""
        if self._thread is not None:
            self._tasks.put(None)
            self._thread.join()
            self._thread = None

    def merge(self, task: Merge) -> Run | None:
        """Merge the runs, the newest two first."""
        result: Run | None
        *older, result = task.inputs
        for run in reversed(older):
            result = merged(run, result, self._vocab_size)
        return result if older else merged(task.inputs[0], None, self._vocab_size, task.cut)

    def _work(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # where the system can: the engine's threads go first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        unseen: list[Run] = []
        while True:
            try:
                task = self._tasks.get(timeout=_RELEASE_SECONDS if unseen else None)
            except queue.Empty:
                task = []
            if task is None:
                return
            if isinstance(task, list):
                unseen.extend(task)
                task.clear()
                unseen = release(unseen)
            elif not self._done(task):
                return
            del task  # or it would hold its runs while the thread waits

    def _done(self, task: Merge) -> bool:
        """Do a merge and return whether it succeeded."""
        started = time.perf_counter()
        try:
            task.result = self.merge(task)
        except Exception:  # out of memory: keep what there is
            self.failed = True
            logger.exception("freedraft: merging live sub-indices failed; nothing more is learnt until a restart")
            return False
        seconds = time.perf_counter() - started
        self.merges, self.seconds, self.longest = self.merges + 1, self.seconds + seconds, max(self.longest, seconds)
        self._on_merged(task)
        return True
