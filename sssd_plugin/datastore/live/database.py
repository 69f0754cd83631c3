"""`LearntDatabase`: the documents of a live datastore, in a sqlite3 file that several processes of a host share.

One row is one document, with its tenant, time and a checksum. The rollback journal (TRUNCATE, synchronous FULL) makes a
change whole or absent after a crash and leaves no copy of old pages behind, as a write-ahead log would. An erasure
overwrites (secure_delete), and VACUUM then leaves no copy of a row in the free space of a page.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from sssd_plugin.datastore.errors import DatastoreError, reporting
from sssd_plugin.datastore.live.free_space import free_bytes
from sssd_plugin.datastore.records import Erasure, Record, keep_shares, now_ms

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
_DUE = "PRAGMA user_version = 1"  # `compact` is to be called, by whom ever if this process is killed
_ANNOUNCE = "INSERT INTO erasures (id, tenant, before, milliseconds) VALUES (?, ?, ?, ?)"

T = TypeVar("T")


class UnreadableFileError(DatastoreError):
    """A file that holds nothing that could be read."""


class LearntDatabase:
    """An open file. It is not thread-safe.

    Args:
        path: made if it is missing.

    Raises:
        DatastoreError: it cannot be opened, or holds something else. sqlite3.Error from the other methods.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.exists():  # closing a file would end the locks that this process has on it
            with reporting("write", path):
                os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        try:
            self._db = _connect(str(path))
            self._seen = 0, 0  # the last erasure and the last document
            self._version = -1
            self._repairing(self._check)
            self._seen = self._newest("erasures"), 0
        except UnicodeDecodeError:  # in the message of an error, which quotes a damaged schema
            raise UnreadableFileError(problem(path, _corrupt())) from None
        except sqlite3.Error as error:
            unreadable = error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
            raise (UnreadableFileError if unreadable else DatastoreError)(problem(path, error)) from None

    def _check(self) -> None:
        with self._transaction():
            for statement in _SCHEMA:
                self._db.execute(statement)
        if self._db.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
            raise _corrupt()

    def read(self) -> tuple[list[Erasure], list[Record]]:
        """Return what other processes have erased and then learnt since the last call; the first returns all documents.

        Rows whose checksums do not match are left out.
        """
        version = self._db.execute("PRAGMA data_version").fetchone()[0]
        if version == self._version:
            return [], []

        def read() -> tuple[list[Erasure], list[Record]]:
            with self._transaction("DEFERRED"):
                return self._read()

        changes = self._repairing(read)
        self._version = version
        return changes

    def write(self, records: Iterable[Record]) -> tuple[list[Erasure], list[Record]]:
        """Append documents, on disk when this returns, less those that an erasure covers; return as `read` does."""
        with self._transaction():
            erasures, others = self._read()
            rows = [
                _row(record)
                for record in records
                if not any(erasure.covers(record.tenant, record.milliseconds) for erasure in erasures)
            ]
            for start in range(0, len(rows), _ROWS_AT_ONCE):  # after each statement this thread waits for the GIL
                some = rows[start : start + _ROWS_AT_ONCE]
                statement = f"{_APPEND} {', '.join(['(?, ?, ?, ?)'] * len(some))}"
                newest = self._db.execute(statement, [value for row in some for value in row]).lastrowid
                assert newest is not None
                self._seen = self._seen[0], newest
        return erasures, others

    def erase(self, erasure: Erasure) -> tuple[int, int]:
        """Erase documents, and damaged ones with them, since nobody can tell whose they are. Other processes follow.
        Call `compact` then.

        Returns:
            Documents and tokens erased.
        """

        def erase() -> tuple[int, int]:
            with self._transaction():
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

        return self._repairing(erase)

    def compact(self) -> None:
        """Leave no copy of what was erased in the file."""
        self._repairing(lambda: self._db.execute("VACUUM"))
        self._db.execute("PRAGMA user_version = 0")

    def holds_older(self, milliseconds: int) -> bool:
        """Return whether there is a document from before this time."""
        older = "SELECT 1 FROM documents WHERE milliseconds < ? LIMIT 1"
        return self._db.execute(older, (milliseconds,)).fetchone() is not None

    def end_erasures(self, alone: bool) -> None:
        """Remove erasures that were announced long enough ago, or all if no other process needs to know of them.

        Whoever erased may have been killed before it called `compact`.
        """
        now = now_ms()
        until = now if alone else now - int(ANNOUNCED_SECONDS * 1000)
        with self._transaction():
            # The clock may have been set back.
            old = self._db.execute("DELETE FROM erasures WHERE milliseconds <= ? OR milliseconds > ?", (until, now))
            if old.rowcount:
                self._db.execute(_DUE)
        if self._db.execute("PRAGMA user_version").fetchone()[0]:
            self.compact()

    def trim(self, max_tokens: int, by_tenant: bool) -> int:
        """Drop the oldest documents of who holds more than an equal share, down to `max_tokens` together, separators
        included; return the tokens that are left."""
        with self._transaction():
            whose = "tenant" if by_tenant else "x''"
            size = "length(tokens) / 4 + 1"
            held = dict(self._db.execute(f"SELECT {whose}, sum({size}) FROM documents GROUP BY 1"))
            if sum(held.values()) <= max_tokens:
                return sum(held.values())
            for tenant, share in keep_shares(held, max_tokens).items():
                if held[tenant] > share:
                    own = f"SELECT id, sum({size}) OVER (ORDER BY id DESC) AS newer FROM documents WHERE {whose} = ?"
                    old = f"SELECT id FROM ({own}) WHERE newer > ?"
                    self._db.execute(f"DELETE FROM documents WHERE id IN ({old})", (tenant, share))
            return int(self._db.execute(f"SELECT total({size}) FROM documents").fetchone()[0])

    def close(self) -> None:
        self._db.close()

    def check(self) -> tuple[int, int, int]:
        """Return the number of documents, how many do not match their checksum, and `free_bytes` of the file.

        Raises:
            sqlite3.DatabaseError: the file itself is damaged.
        """
        with self._transaction("DEFERRED"):  # nobody else writes meanwhile
            if self._db.execute("PRAGMA integrity_check(1)").fetchone() != ("ok",):
                raise _corrupt()
            damaged = [_record(row) is None for row in self._db.execute(_ROWS, (0,))]
            roots = [row[0] for row in self._db.execute("SELECT rootpage FROM sqlite_master WHERE rootpage > 0")]
            with reporting("read", self.path):
                return len(damaged), sum(damaged), free_bytes(self.path.read_bytes(), roots)

    def _read(self) -> tuple[list[Erasure], list[Record]]:
        last_erasure, last_document = self._seen
        erasures: list[Erasure] = []
        newest = self._newest("erasures")
        if newest != last_erasure:
            rows = self._db.execute("SELECT tenant, before FROM erasures WHERE id > ?", (last_erasure,)).fetchall()
            erasures = [Erasure(tenant, before) for tenant, before in rows]
            if len(rows) != newest - last_erasure:  # some are gone already: what the file holds is all there is
                erasures, last_document = [Erasure()], 0
        records: list[Record] = []
        damaged = 0
        for row in self._db.execute(_ROWS, (last_document,)):
            last_document = row[0]
            record = _record(row)
            if record is not None:
                records.append(record)
            else:
                damaged += 1
        if damaged:
            logger.error("freedraft: %s: %d documents are damaged and left out", self.path, damaged)
        self._seen = newest, last_document
        return erasures, records

    def _newest(self, table: str) -> int:
        """Return the largest id that was ever given in a table."""
        row = self._db.execute("SELECT seq FROM sqlite_sequence WHERE name = ?", (table,)).fetchone()
        return int(row[0]) if row else 0

    @contextlib.contextmanager
    def _transaction(self, kind: str = "IMMEDIATE") -> Iterator[None]:
        seen = self._seen
        self._db.execute(f"BEGIN {kind}")
        try:
            yield
            self._db.execute("COMMIT")
        except BaseException:
            self._seen = seen
            with contextlib.suppress(sqlite3.Error):
                self._db.execute("ROLLBACK")
            raise

    def _repairing(self, action: Callable[[], T]) -> T:
        """Do `action`; where the file turns out to be damaged, write what can be read of it anew, and do it then."""
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
            kept = 0
            for row in _readable(self._db, sequences["documents"]):
                if _record(row) is not None:
                    good.execute(_INSERT, row)
                    kept += 1
            # Ids are not given again: other processes remember the last ones that they have read.
            for table, newest in sequences.items():
                good.execute("DELETE FROM sqlite_sequence WHERE name = ?", (table,))
                good.execute("INSERT INTO sqlite_sequence VALUES (?, ?)", (table, newest))
            good.backup(self._db)
        finally:
            good.close()
        logger.error("freedraft: %s was damaged: %d documents of it could be read and are kept", self.path, kept)


def problem(path: Path, error: sqlite3.Error) -> str:
    """Return one line for what sqlite3 says."""
    remedies = {
        sqlite3.SQLITE_FULL: "free some space or choose another disk",
        sqlite3.SQLITE_NOTADB: "restore it, or remove it to start anew",
        sqlite3.SQLITE_CORRUPT: "restore it, or remove it to start anew",
        sqlite3.SQLITE_BUSY: "another process writes it without end: stop that one",
        sqlite3.SQLITE_READONLY: "give this user access or choose another path",
    }
    remedy = remedies.get(getattr(error, "sqlite_errorcode", 0) & 0xFF, "check the disk")
    return f"cannot use {path}: {error}; {remedy}"


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
