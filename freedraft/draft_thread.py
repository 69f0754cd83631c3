"""`DraftThread`: drafts are made in a thread of their own, and no step waits for them longer than it may."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

logger = logging.getLogger(__name__)


class DraftThread:
    """Runs a method's work, one piece after the other; its thread keeps no process alive.

    Args:
        timeout: seconds that a step waits for its drafts.
        note_late: called for each step that goes without.
    """

    def __init__(self, timeout: float, note_late: Callable[[], Any]) -> None:
        self._timeout, self._note_late = timeout, note_late
        self._work: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._newest: Future[Any] = Future()
        self._newest.set_result(None)
        self._told = False
        threading.Thread(target=self._run, name="freedraft-drafter", daemon=True).start()

    def start(self, work: Callable[[], Any]) -> Future[Any] | None:
        """Begin with drafts; None while late ones are still being made."""
        return self._put(work) if self._newest.done() else None

    def result(self, drafts: Future[Any] | None) -> Any:
        """What `start` began with; None where that is late."""
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
        """Do other work for the method: now, or behind drafts that are late."""
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
            except BaseException as error:  # for whoever waits
                done.set_exception(error)
            del work, done
