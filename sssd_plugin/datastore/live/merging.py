"""`MergeThread`: the background thread of a live datastore, which merges runs, erases documents from them, takes large
documents and frees runs that nobody sees."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from sssd_plugin.datastore.index.runs import Run, merged, release, without
from sssd_plugin.datastore.live.tenants import Tenant, kept
from sssd_plugin.datastore.records import Erasure

logger = logging.getLogger("freedraft.datastore")

NICE = 10
_RELEASE_SECONDS = 1.0
_RELEASED_TOKENS = 1 << 16  # smaller runs are unmapped in no time


@dataclass(slots=True, eq=False)
class Merge:
    """Runs to replace by one.

    Attributes:
        owner: whose runs they are.
        inputs: consecutive runs, oldest first.
        erasures: see `tenants.kept`.
        excess: documents that start in the first so many tokens are left out, too.
        more: a run that none of these is yet; it becomes part of the one.
    """

    owner: Tenant
    inputs: list[Run]
    excess: int = 0
    more: Run | None = None
    result: Run | None = None
    erasures: list[tuple[Erasure, int]] = field(init=False)

    def __post_init__(self) -> None:
        self.erasures = list(self.owner.erasures)


class MergeThread:
    """Merges in compiled code that leaves the GIL alone. The thread starts with its first task.

    Args:
        vocab_size: token ids are below it.
        on_merged: called in the thread with each merge that is done.
        learn: called in the thread for each `submit(None)`.

    Attributes:
        failed: a merge failed, for instance for lack of memory; the thread has ended and no more are done.
        merges, seconds, longest: merges done, and what they took, together and at most.
    """

    def __init__(self, vocab_size: int, on_merged: Callable[[Merge], None], learn: Callable[[], None]) -> None:
        self._vocab_size, self._on_merged, self._learn = vocab_size, on_merged, learn
        self._tasks: queue.SimpleQueue[Merge | list[Run] | None] = queue.SimpleQueue()
        self._closed = False
        self._thread: threading.Thread | None = None
        self.failed = False
        self.merges, self.seconds, self.longest = 0, 0.0, 0.0

    def submit(self, task: Merge | list[Run] | None) -> None:
        """Give the thread a merge to do, runs to free, or (None) a large document to learn."""
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
            self._closed = True
            self._tasks.put([])
            self._thread.join()
            self._thread = None

    def merge(self, task: Merge) -> Run | None:
        """Merge the runs, the newest two first."""
        result = task.more
        for run in reversed(task.inputs):
            keep, excess = kept(run, task.erasures), task.excess
            left = run if keep.all() and not excess else without(run, self._vocab_size, keep, excess)
            if left is not None:
                result = left if result is None else merged(left, result, self._vocab_size)
        return result

    def _work(self) -> None:
        with contextlib.suppress(OSError, AttributeError):  # where the system can: the engine's threads go first
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
        unseen: list[Run] = []
        while not (self._closed and self._tasks.empty()):
            try:
                task = self._tasks.get(timeout=_RELEASE_SECONDS if unseen else None)
            except queue.Empty:
                task = []
            if isinstance(task, list):
                unseen.extend(task)
                task.clear()
                unseen = release(unseen)
            elif not self._done(task):
                return
            del task  # or it would hold its runs while the thread waits

    def _done(self, task: Merge | None) -> bool:
        """Do a merge, or learn, and return whether it succeeded."""
        started = time.perf_counter()
        try:
            if task is None:
                self._learn()
                return True
            task.result = self.merge(task)
        except Exception:  # out of memory: keep what there is
            self.failed = True
            logger.exception("freedraft: merging live sub-indices failed; nothing more is learnt until a restart")
            return False
        seconds = time.perf_counter() - started
        self.merges, self.seconds, self.longest = self.merges + 1, self.seconds + seconds, max(self.longest, seconds)
        self._on_merged(task)
        return True
