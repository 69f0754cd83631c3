"""`DraftThread`: drafts in a separate thread, with a limit on how long a step waits for them."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

logger = logging.getLogger(__name__)


class DraftThread:
    """Runs a method's work in a daemon thread, one call at a time.

    Args:
        timeout: seconds that a step waits for its drafts.
        note_late: called for each step that runs without drafts because they were late.
    """

    def __init__(self, timeout: float, note_late: Callable[[], Any]) -> None:
        self._timeout, self._note_late = timeout, note_late
        self._work: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._newest: Future[Any] = Future()
        self._newest.set_result(None)
        self._told = False
        threading.Thread(target=self._run, name="freedraft-drafter", daemon=True).start()

    def start(self, work: Callable[[], Any]) -> Future[Any] | None:
        """Start drafting and return the future; None while late drafts of an earlier step are still running."""
        return self._put(work) if self._newest.done() else None

    def result(self, drafts: Future[Any] | None) -> Any:
        """Return the drafts of a future from `start`; None if they are late."""
        if drafts is not None:
            try:
                return drafts.result(self._timeout)
            except TimeoutError:
                if not self._told:
                    self._told = True
                    logger.warning(
                        "freedraft: a step goes on without drafts, which were not there after %g ms "
                        "(draft_timeout_ms); freedraft_late_steps_total counts such steps", 1e3 * self._timeout,
                    )  # fmt: skip
        self._note_late()
        return None

    def call(self, work: Callable[[], Any]) -> None:
        """Run other work of the method: at once, or in the thread after late drafts."""
        if self._newest.done():
            work()
        else:
            self._put(work)

    def _put(self, work: Callable[[], Any]) -> Future[Any]:
        self._newest = Future()
        self._work.put((work, self._newest))
        return self._newest

    def _run(self) -> None:
        while True:
            work, done = self._work.get()
            try:
                done.set_result(work())
            except BaseException as error:  # raised in the waiting thread
                done.set_exception(error)
            del work, done
