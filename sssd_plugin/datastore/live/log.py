"""`Log`: the documents of a live store in a sqlite3 file that several processes of a host share.

One row is one document, with its tenant, time and a checksum. The rollback journal (TRUNCATE, synchronous FULL) makes a
change whole or absent after a crash and leaves no copy of old pages behind, as a write-ahead log would. An erasure
overwrites (secure_delete), and VACUUM then leaves no copy of a row in the free space of a page.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sqlite3
import time
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np

from sssd_plugin.datastore.disk.format import LIVE, TENANTS_APART, Isolation
from sssd_plugin.datastore.errors import DatastoreError, reporting
from sssd_plugin.datastore.live.folder import FILE, MANIFEST, FolderLock, LiveManifest
from sssd_plugin.datastore.records import Changes, Erasure, PendingRecords, Record, keep_shares, now_ms

logger = logging.getLogger("freedraft.datastore")

ANNOUNCED_SECONDS = 60.0
"""How long an erasure stands in the file, for other processes to follow."""
_BUSY_SECONDS = 10.0
_PRAGMAS = (
    "secure_delete = ON",
    "synchronous = FULL",
    "journal_mode = TRUNCATE",
    "cell_size_check = ON",
    "trusted_schema = OFF",
    "temp_store = MEMORY",  # or VACUUM would write texts to another folder
)
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS documents (id INTEGER PRIMARY KEY AUTOINCREMENT,"
    " tenant BLOB, milliseconds INTEGER, checksum INTEGER, tokens BLOB)",
    "CREATE TABLE IF NOT EXISTS erasures (id INTEGER PRIMARY KEY AUTOINCREMENT,"
    " tenant BLOB, before INTEGER, milliseconds INTEGER)",
)
_ROWS = "SELECT id, tenant, milliseconds, checksum, tokens FROM documents WHERE id > ? ORDER BY id"
_INSERT = "INSERT INTO documents (id, tenant, milliseconds, checksum, tokens) VALUES (?, ?, ?, ?, ?)"
_APPEND = "INSERT INTO documents (tenant, milliseconds, checksum, tokens) VALUES"
_ROWS_AT_ONCE = 1000
_DUE = "PRAGMA user_version = 1"  # `compact` is to be called, by any process if this one is killed
_ANNOUNCE = "INSERT INTO erasures (id, tenant, before, milliseconds) VALUES (?, ?, ?, ?)"
_REMEDIES = {
    sqlite3.SQLITE_FULL: "free some space or choose another disk",
    sqlite3.SQLITE_NOTADB: "restore it, or remove it to start anew",
    sqlite3.SQLITE_CORRUPT: "restore it, or remove it to start anew",
    sqlite3.SQLITE_BUSY: "another process writes it without end: stop that one",
    sqlite3.SQLITE_READONLY: "give this user access or choose another path",
}

T = TypeVar("T")


class UnreadableFileError(DatastoreError):
    """A file that holds nothing that could be read."""


class Log:
    """An open file, for one thread at a time. `pending` only queues; `sync` writes.

    Args:
        folder: that the process has locked, with its manifest.
        max_tokens: beyond which tenants that hold most lose their oldest documents; None for no bound.

    Attributes:
        key: of the digests of tenants' names.
        pending: documents to write.

    Raises:
        DatastoreError: the file cannot be opened or used, or holds something else; from all methods.
    """

    def __init__(
        self,
        folder: Path,
        lock: FolderLock,
        manifest: LiveManifest,
        max_tokens: int | None = None,
        isolated: bool = True,
    ) -> None:
        self.path, self.manifest, self.key = folder / FILE, manifest, bytes.fromhex(manifest.key)
        self.pending = PendingRecords()
        self._lock, self._max_tokens, self._isolated = lock, max_tokens, isolated
        self._tokens = 0  # in the file, at most
        self._end_at = time.monotonic() + ANNOUNCED_SECONDS  # of erasures
        if not self.path.exists():  # closing a file would end the locks that this process has on it
            with reporting("write", self.path):
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        self._seen, self._version = (0, 0), -1  # the last erasure and the last document; of the file
        with self._reporting():
            self._db = _connect(str(self.path))
            self._repairing(self._check_schema)
            self._seen = self._newest("erasures"), 0

    @classmethod
    def open(
        cls, directory: Path, vocab_size: int, max_tokens: int, fingerprint: str | None, isolation: Isolation
    ) -> Self:
        """Open, or start, the live part of the store in `directory`; raises as `open_live` does."""
        folder = Path(directory) / LIVE
        with reporting("write", folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = FolderLock(folder)
        try:
            manifest = LiveManifest.of(folder)
            known = manifest or LiveManifest(vocab_size=vocab_size, fingerprint=fingerprint, isolation=isolation)
            known.check_fits(folder, vocab_size, fingerprint, isolation)
            known = known.narrowed(isolation, folder, lock.alone)
            if known != manifest:
                with reporting("write", folder):
                    known.write(folder / MANIFEST)
            log = cls(folder, lock, known, max_tokens, isolation in TENANTS_APART)
            if lock.alone:
                log.end_erasures(alone=True)
                lock.share()
            return log
        except BaseException:
            lock.release()
            raise

    def load(self) -> list[Record]:
        """Return what is on disk."""
        changes = Changes()
        self.sync(changes)
        return changes.records

    def sync(self, changes: Changes, retry: bool = True) -> None:
        """Write what is queued, to the disk itself, and add erasures and documents of other processes to `changes`."""
        records = self.pending.take()
        try:
            with self._reporting():
                append = partial(self._in_transaction, lambda: self._append(records))
                news = self._repairing(append) if records else self._follow()
        except DatastoreError:
            self.pending.give_back(records)
            with self._reporting():  # what is erased is forgotten though nothing can be written
                news = self._follow()
            changes.erasures.extend(news.erasures)
            changes.records.extend(news.records)
            raise
        changes.erasures.extend(news.erasures)
        changes.records.extend(news.records)
        with self._reporting():
            self._keep_bounds(news, records)

    def expire(self, before: int) -> None:
        """Erase older documents, in ms since 1970, from the disk."""
        with self._reporting():
            if self._db.execute("SELECT 1 FROM documents WHERE milliseconds < ? LIMIT 1", (before,)).fetchone():
                self.erase(Erasure(None, before))
                self._version = -1  # or `_read` would miss this erasure once it is removed, and take all to be erased
                self._end_at = time.monotonic() + ANNOUNCED_SECONDS + 1
                self.compact()

    def close(self) -> None:
        """Leave the folder."""
        self._db.close()
        self._lock.release()

    def erase(self, erasure: Erasure) -> tuple[int, int]:
        """Erase documents, and damaged ones with them, since nobody can tell whose they are; return how many, and their
        tokens. Other processes follow. Call `compact` then."""

        def erase() -> tuple[int, int]:
            gone, tokens = [], 0
            for row in self._db.execute(_ROWS, (0,)):
                record = _record(row)
                if record is None or erasure.covers(record.tenant, record.milliseconds):
                    gone.append((row[0],))
                    tokens += len(record.tokens) if record else 0
            self._db.executemany("DELETE FROM documents WHERE id = ?", gone)
            self._db.execute(_ANNOUNCE, (None, erasure.tenant, erasure.before, now_ms()))
            self._db.execute(_DUE)
            return len(gone), tokens

        with self._reporting():
            return self._repairing(lambda: self._in_transaction(erase))

    def compact(self) -> None:
        """Leave no copy of what was erased in the file."""
        with self._reporting():
            self._repairing(lambda: self._db.execute("VACUUM"))
            self._db.execute("PRAGMA user_version = 0")

    def end_erasures(self, alone: bool) -> None:
        """Remove erasures that were announced long enough ago, or all if no other process needs to know of them; and
        compact for a process that was killed before it did."""
        now = now_ms()
        until = now if alone else now - int(ANNOUNCED_SECONDS * 1000)
        # The clock may have been set back.
        old = "DELETE FROM erasures WHERE milliseconds <= ? OR milliseconds > ?"
        with self._reporting():
            self._in_transaction(lambda: self._db.execute(old, (until, now)).rowcount and self._db.execute(_DUE))
            if self._db.execute("PRAGMA user_version").fetchone()[0]:
                self.compact()

    def check(self) -> tuple[int, int]:
        """Return the number of documents, and how many of them are damaged. A damaged file raises."""

        def check() -> list[bool]:  # nobody else writes meanwhile
            if self._db.execute("PRAGMA integrity_check(1)").fetchone() != ("ok",):
                raise _corrupt()
            return [_record(row) is None for row in self._db.execute(_ROWS, (0,))]

        with self._reporting():
            damaged = self._in_transaction(check, "DEFERRED")
            return len(damaged), sum(damaged)

    def _check_schema(self) -> None:
        self._in_transaction(lambda: [self._db.execute(statement) for statement in _SCHEMA])
        if self._db.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            raise _corrupt()

    def _follow(self) -> Changes:
        """Return what other processes have erased and then learnt since the last call; at first all documents."""
        version = self._db.execute("PRAGMA data_version").fetchone()[0]
        if version == self._version:
            return Changes()
        changes = self._repairing(lambda: self._in_transaction(self._read, "DEFERRED"))
        self._version = version
        return changes

    def _append(self, records: list[Record]) -> Changes:
        """Write documents, less those that an erasure covers; return as `_follow` does."""
        changes = self._read()
        rows = [_row(r) for r in records if not any(e.covers(r.tenant, r.milliseconds) for e in changes.erasures)]
        for start in range(0, len(rows), _ROWS_AT_ONCE):  # after each statement this thread waits for the GIL
            some = rows[start : start + _ROWS_AT_ONCE]
            statement = f"{_APPEND} {', '.join(['(?, ?, ?, ?)'] * len(some))}"
            newest = self._db.execute(statement, [value for row in some for value in row]).lastrowid
            assert newest is not None
            self._seen = self._seen[0], newest
        return changes

    def _read(self) -> Changes:
        (last_erasure, last_document), newest = self._seen, self._newest("erasures")
        rows = self._db.execute("SELECT tenant, before FROM erasures WHERE id > ?", (last_erasure,)).fetchall()
        erasures = [Erasure(tenant, before) for tenant, before in rows]
        if len(rows) != newest - last_erasure:  # some are gone already: what the file holds is all there is
            erasures, last_document = [Erasure()], 0
        found = [(row[0], _record(row)) for row in self._db.execute(_ROWS, (last_document,))]
        records = [record for _, record in found if record is not None]
        if damaged := len(found) - len(records):
            logger.error("freedraft: %s: %d documents are damaged and left out", self.path, damaged)
        self._seen = newest, found[-1][0] if found else last_document
        return Changes(erasures, records)

    def _keep_bounds(self, changes: Changes, written: list[Record]) -> None:
        """Drop documents beyond the bound, and end erasures that every process knows of."""
        self._tokens += sum(record.size for record in (*written, *changes.records))
        if self._max_tokens is not None and self._tokens > self._max_tokens:
            kept = self._max_tokens - self._max_tokens // 8
            self._tokens = self._in_transaction(lambda: self._trim(kept))
        if changes.erasures:
            self._end_at = time.monotonic() + ANNOUNCED_SECONDS + 1
        elif time.monotonic() >= self._end_at:
            self.end_erasures(alone=False)
            self._end_at = math.inf

    def _trim(self, max_tokens: int) -> int:
        """Drop the oldest documents of tenants above an equal share, down to `max_tokens` together; return the tokens
        that are left, separators included."""
        owner = "tenant" if self._isolated else "x''"
        size = "ifnull(length(tokens), 0) / 4 + 1"
        held = dict(self._db.execute(f"SELECT {owner}, sum({size}) FROM documents GROUP BY 1"))
        for tenant, share in keep_shares(held, max_tokens).items():
            if held[tenant] > share:
                own = f"SELECT id, sum({size}) OVER (ORDER BY id DESC) AS newer FROM documents WHERE {owner} = ?"
                old = f"SELECT id FROM ({own}) WHERE newer > ?"
                self._db.execute(f"DELETE FROM documents WHERE id IN ({old})", (tenant, share))
        return int(self._db.execute(f"SELECT total({size}) FROM documents").fetchone()[0])

    def _newest(self, table: str) -> int:
        row = self._db.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", (table,)).fetchone()
        return int(row[0]) if row else 0

    def _in_transaction(self, action: Callable[[], T], kind: str = "IMMEDIATE") -> T:
        seen = self._seen
        self._db.execute(f"BEGIN {kind}")
        try:
            result = action()
            self._db.execute("COMMIT")
            return result
        except BaseException:
            self._seen = seen
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise

    def _repairing(self, action: Callable[[], T]) -> T:
        """Do `action`; where the file turns out to be damaged, write its readable rows anew, and do it then."""
        try:
            return action()
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_CORRUPT:
                raise
            self._rewrite()
            return action()

    def _rewrite(self) -> None:
        good = _connect(":memory:")
        try:
            for statement in _SCHEMA:
                good.execute(statement)
            sequences = {"documents": 0, "erasures": 0}
            for table in sequences:
                with contextlib.suppress(sqlite3.DatabaseError):
                    sequences[table] = self._newest(table)
            with contextlib.suppress(sqlite3.DatabaseError):
                good.executemany(_ANNOUNCE, self._db.execute("SELECT id, tenant, before, milliseconds FROM erasures"))
            rows = [row for row in _readable(self._db, sequences["documents"]) if _record(row) is not None]
            good.executemany(_INSERT, rows)
            # Ids are not given again: other processes remember the last ones that they have read.
            for table, newest in sequences.items():
                good.execute("DELETE FROM sqlite_sequence WHERE name = ?", (table,))
                good.execute("INSERT INTO sqlite_sequence VALUES (?, ?)", (table, newest))
            good.backup(self._db)
        finally:
            good.close()
        logger.error("freedraft: %s was damaged: %d documents of it could be read and are kept", self.path, len(rows))

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter where a message quotes a damaged schema
            problem = error if isinstance(error, sqlite3.Error) else _corrupt()
            code = getattr(problem, "sqlite_errorcode", 0) & 0xFF
            kind = UnreadableFileError if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT) else DatastoreError
            raise kind(f"cannot use {self.path}: {problem}; {_REMEDIES.get(code, 'check the disk')}") from None


def _connect(path: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    for pragma in _PRAGMAS:
        db.execute(f"PRAGMA {pragma}")
    return db


def _row(record: Record) -> tuple[bytes, int, int, bytes]:
    tokens = np.ascontiguousarray(record.tokens, "<i4").tobytes()
    return record.tenant, record.milliseconds, _checksum(record.tenant, record.milliseconds, tokens), tokens


def _record(row: tuple[Any, ...]) -> Record | None:
    """Return the document in a row; None where its checksum does not match."""
    _, tenant, milliseconds, checksum, tokens = row
    if not (isinstance(tenant, bytes) and isinstance(milliseconds, int) and isinstance(tokens, bytes)):
        return None
    if len(tokens) % 4 or abs(milliseconds) >= 1 << 62 or _checksum(tenant, milliseconds, tokens) != checksum:
        return None
    return Record(tenant, milliseconds, np.frombuffer(tokens, "<i4").astype(np.int32))


def _checksum(tenant: bytes, milliseconds: int, tokens: bytes) -> int:
    return zlib.crc32(tokens, zlib.crc32(milliseconds.to_bytes(8, "little", signed=True) + tenant))


def _readable(db: sqlite3.Connection, newest: int) -> Iterator[tuple[Any, ...]]:
    """Yield the rows that can be read of a damaged table; a page that cannot be read is passed over."""
    at = 0
    while True:
        try:
            for row in db.execute(_ROWS, (at,)):
                at = row[0]
                yield row
            return
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_CORRUPT or at >= newest:
                return
            at += 1


def _corrupt() -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError("the file is damaged")
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error
