"""`DraftThread`: drafts in a separate thread, with a limit on how long a step waits for them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

logger = logging.getLogger(__name__)


class DraftThread:
    """Runs a method's work in a thread, one call at a time.

    Args:
        timeout: seconds that a step waits for its drafts.
        note_late: called for each step that runs without drafts because they were late.
    """

    def __init__(self, timeout: float, note_late: Callable[[], Any]) -> None:
        self._timeout, self._note_late = timeout, note_late
        self._thread = ThreadPoolExecutor(1, "freedraft-drafter")
        self._newest: Future[Any] = Future()
        self._newest.set_result(None)
        self._told = False

    def start(self, work: Callable[[], Any]) -> Future[Any] | None:
        """Start drafting and return the future; None while late drafts of an earlier step are still running."""
        if not self._newest.done():
            return None
        self._newest = self._thread.submit(work)
        return self._newest

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
            self._newest = self._thread.submit(work)
