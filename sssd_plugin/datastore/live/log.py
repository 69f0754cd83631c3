"""`DocumentLog`: what a live datastore keeps on disk, written by and by, and what other processes of the host learn."""

from __future__ import annotations

import logging
import math
import sqlite3
import threading
import time
from pathlib import Path

from sssd_plugin.datastore.disk.format import LIVE, Isolation
from sssd_plugin.datastore.errors import DatastoreError, reporting
from sssd_plugin.datastore.live.database import ANNOUNCED_SECONDS, LearntDatabase, problem
from sssd_plugin.datastore.live.folder import FILE, MANIFEST, FolderLock, LiveManifest
from sssd_plugin.datastore.records import Changes, Erasure, PendingRecords, Record

logger = logging.getLogger("freedraft.datastore")

_RETRY_SECONDS = 5.0


class DocumentLog:
    """The documents of one live datastore on disk. Use `open`.

    `pending` only queues; `sync` writes. When the disk refuses, that is logged once, drafting goes on with what is in
    memory, and writing is tried again.

    Attributes:
        key: of the digests of tenants' names.
        pending: what is to be written.
    """

    def __init__(
        self, database: LearntDatabase, lock: FolderLock, manifest: LiveManifest, max_tokens: int, isolated: bool
    ) -> None:
        self.key = bytes.fromhex(manifest.key)
        self._database, self._lock = database, lock
        self._max_tokens, self._isolated = max_tokens, isolated
        self._tokens = 0  # in the file, at most
        self.pending = PendingRecords()
        self._syncing = threading.Lock()
        self._retry_at = 0.0
        self._end_at = time.monotonic() + ANNOUNCED_SECONDS  # of erasures
        self._refused = self._closed = False

    @classmethod
    def open(
        cls, directory: Path, vocab_size: int, max_tokens: int, fingerprint: str | None, isolation: Isolation
    ) -> DocumentLog:
        """Open, or start, the live part of the store in `directory`.

        Raises:
            DatastoreError: see `open_live`.
        """
        folder = Path(directory) / LIVE
        with reporting("write", folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = FolderLock(folder)
        try:
            manifest = LiveManifest.of(folder)
            known = manifest or LiveManifest(vocab_size=vocab_size, fingerprint=fingerprint, isolation=isolation)
            known.check_fits(folder, vocab_size, fingerprint, isolation)
            known = known.narrowed(isolation)
            if known != manifest:
                with reporting("write", folder):
                    known.write(folder / MANIFEST)
            database = LearntDatabase(folder / FILE)
            if lock.alone:
                try:
                    database.end_erasures(alone=True)
                except sqlite3.Error as error:
                    raise DatastoreError(problem(database.path, error)) from None
                lock.share()
            return cls(database, lock, known, max_tokens, isolation == "tenant")
        except BaseException:
            lock.release()
            raise

    def load(self) -> list[Record]:
        """Return what is on disk."""
        return self.sync().records

    def sync(self, retry: bool = True) -> Changes:
        """Write what is queued, to the disk itself, and return what other processes have erased and then learnt.

        Args:
            retry: whether to try although the disk has just refused.
        """
        with self._syncing:
            if self._closed or (self._refused and not retry and time.monotonic() < self._retry_at):
                return Changes([], [])
            records = self.pending.take()
            try:
                changes = Changes(*(self._database.write(records) if records else self._database.read()))
            except sqlite3.Error as error:
                self._refuse(error, records)
                return Changes([], [])
            try:
                self._keep_bounds(changes.erasures, changes.records, records)
            except sqlite3.Error as error:
                self._refuse(error, [])
                return changes
            if self._refused:
                logger.warning("freedraft: writing %s works again", self._database.path)
            self._refused = False
            return changes

    def expire(self, before: int) -> None:
        """Erase what is older, in ms since 1970, from the disk."""
        with self._syncing:
            try:
                if not self._closed and self._database.holds_older(before):
                    self._database.erase(Erasure(None, before))
                    self._database.compact()
                    self._end_at = time.monotonic() + ANNOUNCED_SECONDS + 1
            except sqlite3.Error as error:
                logger.warning("freedraft: %s; what is too old is erased later", problem(self._database.path, error))

    def close(self) -> None:
        """Write what is queued and leave the folder; may be called twice."""
        self.sync()
        with self._syncing:
            if not self._closed:
                self._closed = True
                self._database.close()
                self._lock.release()

    def _keep_bounds(self, erasures: list[Erasure], others: list[Record], records: list[Record]) -> None:
        """Drop documents beyond the bound, and end erasures that every process knows of."""
        self._tokens += sum(record.size for record in (*records, *others))
        if self._tokens > self._max_tokens:
            self._tokens = self._database.trim(self._max_tokens - self._max_tokens // 8, self._isolated)
        if erasures:
            self._end_at = time.monotonic() + ANNOUNCED_SECONDS + 1
        elif time.monotonic() >= self._end_at:
            self._end_at = math.inf
            self._database.end_erasures(alone=False)

    def _refuse(self, error: sqlite3.Error, records: list[Record]) -> None:
        if not self._refused:
            logger.warning(
                "freedraft: %s; what is learnt stays in memory, and writing is tried again",
                problem(self._database.path, error),
            )
        self._refused, self._retry_at = True, time.monotonic() + _RETRY_SECONDS
        self.pending.give_back(records)
