"""`DocumentFile`: learnt documents in a sqlite3 file, repaired if damaged.

One row is one document, with its tenant, time and a checksum. With the rollback journal (TRUNCATE, synchronous FULL) a
change is complete or absent after a crash, and no copy of old pages remains, unlike with a write-ahead log. An erasure
overwrites rows (secure_delete), and VACUUM removes copies from the free space of pages.
"""

import contextlib
import logging
import os
import sqlite3
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from sssd_plugin.datastore.errors import DatastoreError, reporting
from sssd_plugin.datastore.records import Record

logger = logging.getLogger("freedraft.datastore")

_BUSY_SECONDS = 10.0
_PRAGMAS = (
    "secure_delete = ON",
    "synchronous = FULL",
    "journal_mode = TRUNCATE",
    "cell_size_check = ON",
    "trusted_schema = OFF",
    "temp_store = MEMORY",  # VACUUM must not write texts to another folder
)
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS documents (id INTEGER PRIMARY KEY AUTOINCREMENT,"
    " tenant INTEGER, milliseconds INTEGER, checksum INTEGER, tokens BLOB)",
    "CREATE TABLE IF NOT EXISTS erasures (id INTEGER PRIMARY KEY AUTOINCREMENT,"
    " tenant INTEGER, before INTEGER, milliseconds INTEGER)",
)
_ROWS = "SELECT id, tenant, milliseconds, checksum, tokens FROM documents WHERE id > ? ORDER BY id"
_REMEDIES = {
    sqlite3.SQLITE_FULL: "free some space or choose another disk",
    sqlite3.SQLITE_NOTADB: "restore it, or remove it to start anew",
    sqlite3.SQLITE_CORRUPT: "restore it, or remove it to start anew",
    sqlite3.SQLITE_BUSY: "another process writes it without end: stop that one",
    sqlite3.SQLITE_READONLY: "give this user access or choose another path",
}


class UnreadableFileError(DatastoreError):
    """A file without any readable contents."""


class DocumentFile:
    """An open file, for one thread at a time. All methods raise DatastoreError: it cannot be opened or used, or is
    another kind of file.

    Attributes:
        db: to execute statements, in a `transaction`, or under `reporting`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():  # closing it would release this process's locks on it
            with reporting("write", path):
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        with self.reporting():
            self.db = _connect(str(path))
            try:
                for statement in _SCHEMA:
                    self.db.execute(statement)
                self._must_be_sound("quick_check")
            except sqlite3.DatabaseError as error:
                if _code(error) != sqlite3.SQLITE_CORRUPT:
                    raise
                self.repair()

    @contextlib.contextmanager
    def transaction(self, kind: str = "IMMEDIATE") -> Iterator[sqlite3.Connection]:
        with self.reporting():
            self.db.execute(f"BEGIN {kind}")
            with self.db:  # commits, or rolls back
                yield self.db

    def compact(self) -> None:
        """Remove all copies of erased rows from the file."""
        with self.reporting():
            self.db.execute("VACUUM")
            self.db.execute("PRAGMA user_version = 0")

    def check(self) -> tuple[int, int]:
        """Return the numbers of documents and of damaged ones. Raises for a damaged file."""
        with self.transaction("DEFERRED"):  # no concurrent writer
            self._must_be_sound("integrity_check")
            damaged = [record is None for _, record in self.documents(0)]
        return len(damaged), sum(damaged)

    @contextlib.contextmanager
    def reporting(self) -> Iterator[None]:
        """Turn errors of sqlite3 into one line with the file and the remedy."""
        try:
            yield
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter if a message quotes a damaged schema
            problem = error if isinstance(error, sqlite3.Error) else _corrupt()
            code = _code(problem)
            kind = UnreadableFileError if code in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT) else DatastoreError
            raise kind(f"cannot use {self.path}: {problem}; {_REMEDIES.get(code, 'check the disk')}") from None

    def documents(self, after: int) -> Iterator[tuple[int, Record | None]]:
        """Yield ids and documents with ids above `after`; None for a damaged document."""
        for row in self.db.execute(_ROWS, (after,)):
            yield row[0], _record(row)

    def newest(self, table: str) -> int:  # largest id ever used
        row = self.db.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", (table,)).fetchone()
        return int(row[0]) if row else 0

    def _must_be_sound(self, pragma: str) -> None:
        if self.db.execute(f"PRAGMA {pragma}(1)").fetchone() != ("ok",):
            raise _corrupt()

    def repair(self) -> None:
        """Rewrite a damaged file: keep the rows that can be read."""
        with self.reporting(), contextlib.closing(_connect(":memory:")) as good:
            for statement in _SCHEMA:
                good.execute(statement)
            newest = {"documents": 0, "erasures": 0}
            for table in newest:
                with contextlib.suppress(sqlite3.DatabaseError):
                    newest[table] = self.newest(table)
            kept = [row for row in self._readable(newest["documents"]) if _record(row) is not None]
            good.executemany("INSERT INTO documents VALUES (?, ?, ?, ?, ?)", kept)
            # Ids are never reused: other processes remember the last ones that they have read, and take all documents
            # anew where erasures are missing.
            good.execute("DELETE FROM sqlite_sequence")
            good.executemany("INSERT INTO sqlite_sequence VALUES (?, ?)", newest.items())
            good.backup(self.db)
        logger.error("freedraft: %s was damaged: %d documents of it could be read and are kept", self.path, len(kept))

    def _readable(self, newest: int) -> Iterator[tuple[Any, ...]]:
        at = 0
        while True:
            try:
                for row in self.db.execute(_ROWS, (at,)):
                    at = row[0]
                    yield row
                return
            except sqlite3.DatabaseError as error:
                if _code(error) != sqlite3.SQLITE_CORRUPT or at >= newest:
                    return
                at += 1


def row_of(record: Record) -> tuple[int, int, int, bytes]:
    """Return the columns of a document, its id left out."""
    tokens = np.ascontiguousarray(record.tokens, "<i4").tobytes()
    return record.tenant, record.milliseconds, _checksum(record.tenant, record.milliseconds, tokens), tokens


def _connect(path: str) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    for pragma in _PRAGMAS:
        db.execute(f"PRAGMA {pragma}")
    return db


def _record(row: tuple[Any, ...]) -> Record | None:  # None if it is damaged
    _, tenant, milliseconds, checksum, tokens = row
    if not (isinstance(tenant, int) and isinstance(milliseconds, int) and isinstance(tokens, bytes)):
        return None
    if tenant < 0 or abs(milliseconds) >= 1 << 62 or len(tokens) % 4:
        return None
    if _checksum(tenant, milliseconds, tokens) != checksum:
        return None
    return Record(tenant, milliseconds, np.frombuffer(tokens, "<i4").astype(np.int32))


def _checksum(tenant: int, milliseconds: int, tokens: bytes) -> int:
    return zlib.crc32(tokens, zlib.crc32(np.array([milliseconds, tenant], "<i8").tobytes()))


def _code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _corrupt() -> sqlite3.DatabaseError:
    error = sqlite3.DatabaseError("the file is damaged")
    error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
    return error
