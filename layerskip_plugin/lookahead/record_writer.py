"""`RecordWriter`: writes what a `Recording` has kept, now and then, without holding up drafts."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from layerskip_plugin.lookahead.base import Lookahead
from layerskip_plugin.lookahead.records import Recording

logger = logging.getLogger("freedraft.layerskip")

SAVE_SECONDS = 10.0
"""Records are written when no request is left, and while some run, this often at most."""


class RecordWriter:
    """See above.

    Args:
        policy: does nothing for those that record nothing.
        prices: see `Recording.save`.
    """

    def __init__(self, policy: Lookahead, prices: Callable[[], tuple[float, float] | None]) -> None:
        self._recording = policy if isinstance(policy, Recording) else None
        self._prices, self._saved, self._kept = prices, 0.0, 0
        self._thread: threading.Thread | None = None

    def write_if_due(self, *, idle: bool) -> None:
        """In a thread: so many take long to compress.

        Args:
            idle: whether no request is left.
        """
        if self._recording is None or self._recording.kept == self._kept:
            return
        if (self._thread is not None and self._thread.is_alive()) or not (
            idle or time.monotonic() > self._saved + SAVE_SECONDS
        ):
            return
        self._saved = time.monotonic()
        self._thread = threading.Thread(target=self._save, args=(self._recording, self._prices()), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Write what came since; by itself, as no thread begins any more at an interpreter's end."""
        if self._thread is not None:
            self._thread.join()
        if self._recording is not None and self._recording.kept != self._kept:
            self._save(self._recording, self._prices())

    def _save(self, recording: Recording, prices: tuple[float, float] | None) -> None:
        kept = recording.kept
        try:
            recording.save(prices)
        except OSError as error:
            logger.warning("freedraft: cannot write %s: %s; it is tried again", recording.path, error.strerror or error)
        else:
            self._kept = kept
