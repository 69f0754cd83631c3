"""`Log`: the documents of a live store in a file shared by processes of a host, which follow each other's changes."""

import logging
import math
import time
from pathlib import Path
from typing import Self

from sssd_plugin.datastore.disk.format import LIVE
from sssd_plugin.datastore.errors import DatastoreError, reporting
from sssd_plugin.datastore.live.document_file import DocumentFile, UnreadableFileError, row_of
from sssd_plugin.datastore.live.folder import FILE, MANIFEST, FolderLock, LiveManifest
from sssd_plugin.datastore.records import Changes, Erasure, PendingRecords, Record, keep_shares, now_ms

logger = logging.getLogger("freedraft.datastore")

ANNOUNCED_SECONDS = 60.0  # time for which an erasure stays in the file, for other processes
_ROWS_AT_ONCE = 1000
_DUE = "PRAGMA user_version = 1"  # `compact` is due, by any process if this one is killed


class Log:
    """The `file` in a folder locked by the process, for one thread at a time. `pending` only queues; `sync` writes.
    Beyond `max_tokens` (None: no bound), the largest tenants lose their oldest documents."""

    def __init__(self, folder: Path, lock: FolderLock, manifest: LiveManifest, max_tokens: int | None = None) -> None:
        self.file = DocumentFile(folder / FILE)
        self.key, self.pending = bytes.fromhex(manifest.key), PendingRecords()  # the key of `tenant_number`
        self._lock, self._max_tokens, self._isolated = lock, max_tokens, manifest.isolation != "shared"
        self._tokens = 0  # in the file, at most
        self._end_at = time.monotonic() + ANNOUNCED_SECONDS  # of erasures
        self._version = -1  # of the file
        with self.file.reporting():  # the last erasure and the last document
            self._seen = self.file.newest("erasures"), 0

    @classmethod
    def open(cls, directory: Path, server: LiveManifest, max_tokens: int) -> Self:
        """Open, or create, the live part of the store in `directory` for a server that would write this manifest;
        raises like `LiveStore`."""
        folder = Path(directory) / LIVE
        with reporting("write", folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = FolderLock(folder)
        try:
            before = LiveManifest.of(folder)
            manifest = (before or server).admitting(folder, server, lock.alone)
            if manifest != before:
                with reporting("write", folder):
                    manifest.write(folder / MANIFEST)
            log = cls(folder, lock, manifest, max_tokens)
            if lock.alone:
                log.end_erasures(alone=True)
                lock.share()
            return log
        except BaseException:
            lock.close()
            raise

    def load(self) -> list[Record]:
        changes = Changes()
        self.sync(changes)
        return changes.records

    def sync(self, changes: Changes, retry: bool = True) -> None:
        """Write queued documents durably, and add erasures and documents of other processes to `changes`."""
        records, failure = self.pending.take(), None
        try:
            news = self._append(records) if records else self._follow()
        except DatastoreError as error:
            self.pending.give_back(records)
            if isinstance(error, UnreadableFileError):
                self.file.repair()
            news, failure = self._follow(), error  # erasures apply even if nothing can be written
        changes.erasures.extend(news.erasures)
        changes.records.extend(news.records)
        if failure is not None:
            raise failure
        self._keep_bounds(news, records)

    def expire(self, before: int) -> None:
        """Erase documents from before this time (ms since 1970) from the disk."""
        old = "SELECT 1 FROM documents WHERE milliseconds < ? LIMIT 1"
        with self.file.reporting():
            found = self.file.db.execute(old, (before,)).fetchone()
        if found:
            self.erase(Erasure(None, before))
            self._version = -1  # else `_read` would miss this erasure and treat all as erased
            self._end_at = time.monotonic() + ANNOUNCED_SECONDS + 1
            self.file.compact()

    def close(self) -> None:
        self.file.db.close()
        self._lock.close()

    def erase(self, *erasures: Erasure) -> tuple[int, int]:
        """Erase documents, and all damaged ones, since their tenants are unknown; return their number and tokens. Other
        processes follow. Call `file.compact` afterwards."""
        with self.file.transaction() as db:
            gone = {
                at: 0 if record is None else len(record.tokens)
                for at, record in self.file.documents(0)
                if record is None or any(erasure.covers(record) for erasure in erasures)
            }
            db.executemany("DELETE FROM documents WHERE id = ?", [(at,) for at in gone])
            announce = "INSERT INTO erasures (tenant, before, milliseconds) VALUES (?, ?, ?)"
            db.executemany(announce, [(erasure.tenant, erasure.before, now_ms()) for erasure in erasures])
            db.execute(_DUE)
        return len(gone), sum(gone.values())

    def end_erasures(self, alone: bool) -> None:
        """Remove erasures announced long enough ago, or all if there is no other process; compact if a killed process
        did not."""
        now = now_ms()
        until = now if alone else now - int(ANNOUNCED_SECONDS * 1000)
        old = "DELETE FROM erasures WHERE milliseconds <= ? OR milliseconds > ?"  # the clock was set back
        with self.file.transaction() as db:
            if db.execute(old, (until, now)).rowcount:
                db.execute(_DUE)
            due = db.execute("PRAGMA user_version").fetchone()[0]
        if due:
            self.file.compact()

    def _follow(self) -> Changes:
        """Return erasures and then new documents of other processes since the last call; at first all documents."""
        with self.file.reporting():
            version = self.file.db.execute("PRAGMA data_version").fetchone()[0]
        if version == self._version:
            return Changes()
        with self.file.transaction("DEFERRED"):
            changes, self._seen = self._read()
        self._version = version
        return changes

    def _append(self, records: list[Record]) -> Changes:
        with self.file.transaction() as db:
            changes, (erasure, newest) = self._read()
            rows = [row_of(record) for record in records if not any(e.covers(record) for e in changes.erasures)]
            for start in range(0, len(rows), _ROWS_AT_ONCE):  # after each statement this thread waits for the GIL
                some = rows[start : start + _ROWS_AT_ONCE]
                places = ", ".join(["(?, ?, ?, ?)"] * len(some))
                statement = f"INSERT INTO documents (tenant, milliseconds, checksum, tokens) VALUES {places}"
                newest = db.execute(statement, [value for row in some for value in row]).lastrowid or newest
        self._seen = erasure, newest
        return changes

    def _read(self) -> tuple[Changes, tuple[int, int]]:
        """Return changes since the last call, and the ids of the last erasure and the last document."""
        (last_erasure, last_document), newest = self._seen, self.file.newest("erasures")
        rows = self.file.db.execute("SELECT tenant, before FROM erasures WHERE id > ?", (last_erasure,)).fetchall()
        erasures = [Erasure(tenant, before) for tenant, before in rows]
        if len(rows) != newest - last_erasure:  # some were removed already: replace everything by the file's contents
            erasures, last_document = [Erasure()], 0
        found = list(self.file.documents(last_document))
        records = [record for _, record in found if record is not None]
        if damaged := len(found) - len(records):
            logger.error("freedraft: %s: %d documents are damaged and left out", self.file.path, damaged)
        return Changes(erasures, records), (newest, found[-1][0] if found else last_document)

    def _keep_bounds(self, changes: Changes, written: list[Record]) -> None:
        self._tokens += sum(record.size for record in (*written, *changes.records))
        if self._max_tokens is not None and self._tokens > self._max_tokens:
            kept = self._max_tokens - self._max_tokens // 8
            with self.file.transaction():
                self._tokens = self._trim(kept)
        if changes.erasures:
            self._end_at = time.monotonic() + ANNOUNCED_SECONDS + 1
        elif time.monotonic() >= self._end_at:
            self.end_erasures(alone=False)
            self._end_at = math.inf

    def _trim(self, max_tokens: int) -> int:
        """Drop the oldest documents of tenants above an equal share, down to `max_tokens` together, the longest idle
        tenants first; return the tokens that are left, separators included."""
        owner = "tenant" if self._isolated else "0"
        size = "ifnull(length(tokens), 0) / 4 + 1"
        held = dict(self.file.db.execute(f"SELECT {owner}, sum({size}) FROM documents GROUP BY 1 ORDER BY max(id)"))
        left, shares = sum(held.values()), keep_shares(held, max_tokens)
        for tenant, tokens in held.items():
            if tokens > shares[tenant] and left > max_tokens:  # documents are dropped whole
                own = f"SELECT id, sum({size}) OVER (ORDER BY id DESC) AS newer FROM documents WHERE {owner} = ?"
                old = f"FROM documents WHERE id IN (SELECT id FROM ({own}) WHERE newer > ?)"
                left -= self.file.db.execute(f"SELECT total({size}) {old}", (tenant, shares[tenant])).fetchone()[0]
                self.file.db.execute(f"DELETE {old}", (tenant, shares[tenant]))
        return int(left)
