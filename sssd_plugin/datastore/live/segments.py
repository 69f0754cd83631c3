"""`SegmentLog`: finished documents on disk, in append-only segments under an atomically replaced manifest.

    STORE/live/lock             held by the one writer while it lives
    STORE/live/manifest.json    the segments, oldest first; the last one is being appended to
    STORE/live/000001.seg       a header, then records; see `records`

All of it is of mode 0600. Suffix arrays are not stored: sorting is faster than proving that a stored order is right.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from freedraft.files import FileLock, write_all
from sssd_plugin.datastore.disk.format import LIVE
from sssd_plugin.datastore.errors import DatastoreError, reporting
from sssd_plugin.datastore.live.folder import LOCK, MANIFEST, LiveManifest, SegmentEntry, lock_writer, segment_name
from sssd_plugin.datastore.live.records import SEGMENT_HEADER, Record, in_parts, replace_segments, scan_segment
from sssd_plugin.datastore.live.tenants import tenant_digest

logger = logging.getLogger("freedraft.datastore")

SEGMENT_TOKENS = 1 << 20
FLUSH_SECONDS = 0.2
"""What arrived within the last so many seconds may be lost when the machine stops."""
_RETRY_SECONDS = 5.0
_MAX_PENDING = 4 << 20  # tokens kept for writing while the disk refuses


class SegmentLog:
    """The documents of one live datastore on disk. Use `open`.

    `append` only queues; one thread writes what has come, every `FLUSH_SECONDS`. When the disk refuses, that is logged
    once, drafting goes on with what is in memory, and writing is tried again.

    Attributes:
        key: of the digests of tenants' names.
        writable: whether this process is the writer.
    """

    def __init__(self, folder: Path, manifest: LiveManifest, lock: FileLock | None, max_tokens: int) -> None:
        self.folder = folder
        self.key = bytes.fromhex(manifest.key)
        self.writable = lock is not None
        self._manifest, self._lock, self._max_tokens = manifest, lock, max_tokens
        self._segment_tokens = max(1, min(SEGMENT_TOKENS, max_tokens // 16))
        self._recovered: list[Record] = []
        self._pending: deque[Record] = deque()
        self._pending_tokens = 0
        self._mutex = threading.Lock()  # of the queue
        self._writing = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._fd: int | None = None
        self._size = self._tokens = 0  # of the segment that is appended to
        self._retry_at = 0.0
        self._refused = False

    @classmethod
    def open(
        cls,
        directory: Path,
        vocab_size: int,
        max_tokens: int,
        fingerprint: str | None = None,
        writer: bool = True,
        second_writer: Literal["refuse", "read"] = "refuse",
    ) -> SegmentLog:
        """Open, or start, the live part of the store in `directory`, and read what it holds.

        Raises:
            DatastoreError: see `open_live`.
        """
        folder = Path(directory) / LIVE
        lock = None
        if writer:
            with reporting("write", folder):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = lock_writer(folder)
            if lock is None and second_writer == "refuse":
                raise _busy(folder)
            if lock is None:
                logger.warning("freedraft: another process writes %s: reading only, learning in memory", folder)
        try:
            manifest = LiveManifest.of(folder)
            if manifest is None:
                manifest = LiveManifest(vocab_size=vocab_size, fingerprint=fingerprint, key=secrets.token_hex(16))
                if lock is not None:
                    with reporting("write", folder):
                        manifest.write(folder / MANIFEST)
            manifest.check_fits(folder, vocab_size, fingerprint)
            for _ in range(5):
                log = cls(folder, manifest, lock, max_tokens)
                log._recover()
                # While a reader reads, the writer may replace segments.
                now = manifest if lock is not None else LiveManifest.of(folder) or manifest
                if now == manifest:
                    break
                manifest = now
        except BaseException:
            if lock is not None:
                lock.release()
            raise
        return log

    def take_recovered(self) -> list[Record]:
        """Return the documents that were there, oldest first; the second call returns none."""
        records, self._recovered = self._recovered, []
        return records

    def append(self, tenant: bytes, tokens: NDArray[np.int32]) -> None:
        """Write a document soon. tenant: 16 bytes, or none; tokens: int32 [n], copied."""
        if not self.writable:
            return
        record = Record(tenant, time.time_ns() // 1_000_000, np.array(tokens, np.int32))
        with self._mutex:
            self._pending.append(record)
            self._pending_tokens += len(record.tokens)
            while self._pending_tokens > _MAX_PENDING and len(self._pending) > 1:
                self._pending_tokens -= len(self._pending.popleft().tokens)
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_often, name="freedraft-log", daemon=True)
            self._thread.start()

    def flush(self) -> bool:
        """Write what is queued, to the disk itself, and return whether the disk took it."""
        with self._writing:
            return self._write_pending()

    def close(self) -> None:
        """Write what is queued and release the lock; may be called twice."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self.writable:
            self.flush()
        if self._fd is not None:
            with contextlib.suppress(OSError):  # the next start finds out where it ends
                self._replace(segments=self._sealed())
            os.close(self._fd)
            self._fd = None
        if self._lock is not None:
            self._lock.release()
        self.writable = False

    def _recover(self) -> None:
        entries = []
        whole = True
        for entry in self._manifest.segments:
            path = self.folder / entry.name
            try:
                scan = scan_segment(path)
            except DatastoreError as error:
                logger.error("freedraft: %s; going on without what it holds", error)
                entries.append(entry)
                whole = False
                continue
            self._recovered += scan.records
            if scan.damaged:
                logger.error("freedraft: %s is damaged: %d bytes of it are left out", path, scan.damaged)
                whole = False
            if entry.size is None:
                if scan.end < scan.size and self.writable:
                    logger.warning(
                        "freedraft: %s ends in a document that was being written when its writer stopped: "
                        "its %d bytes are dropped",
                        path,
                        scan.size - scan.end,
                    )
                    with reporting("write", path):
                        os.truncate(path, scan.end)
                tokens = sum(record.size for record in scan.records)
                entry = SegmentEntry(name=entry.name, size=scan.end, tokens=tokens)
            elif scan.end < entry.size:
                logger.error("freedraft: %s is truncated: %d bytes are missing", path, entry.size - scan.end)
            entries.append(entry)
        if self.writable:
            # What is there stays as it is; a new segment is begun with the first document.
            if tuple(entries) != self._manifest.segments:
                with reporting("write", self.folder):
                    self._replace(segments=tuple(entries))
            self._remove_unnamed()
            if whole and len(entries) > 64 + 2 * self._max_tokens // self._segment_tokens:
                # Many restarts leave many small segments: make full ones of them.
                parts = in_parts(self._recovered, self._segment_tokens)
                with reporting("write", self.folder):
                    self._manifest = replace_segments(self.folder, self._manifest, parts)

    def _remove_unnamed(self) -> None:
        named = {entry.name for entry in self._manifest.segments}
        with contextlib.suppress(OSError):
            for path in (*self.folder.glob("*.seg"), *self.folder.glob(f".{MANIFEST}.*.new")):
                if path.name not in named:
                    path.unlink(missing_ok=True)

    def _write_often(self) -> None:
        while not self._stop.wait(FLUSH_SECONDS):
            if self._pending and time.monotonic() >= self._retry_at:
                self.flush()

    def _write_pending(self) -> bool:
        with self._mutex:
            records, self._pending = list(self._pending), deque()
            self._pending_tokens = 0
        if not records:
            return not self._refused
        done = 0
        try:
            while done < len(records):
                done += self._write(records[done:])
        except OSError as error:
            if not self._refused:
                logger.warning(
                    "freedraft: cannot write %s: %s; what is learnt stays in memory, and writing is tried again",
                    self.folder,
                    error.strerror or error,
                )
            self._refused, self._retry_at = True, time.monotonic() + _RETRY_SECONDS
            with self._mutex:
                self._pending.extendleft(reversed(records[done:]))
                self._pending_tokens = sum(len(record.tokens) for record in self._pending)
            return False
        if self._refused:
            logger.warning("freedraft: writing %s works again", self.folder)
        self._refused = False
        return True

    def _write(self, records: list[Record]) -> int:
        """Append as many documents as the segment takes, at least one, and return how many."""
        if self._fd is None or self._tokens >= self._segment_tokens:
            self._begin_segment()
        assert self._fd is not None
        data, tokens, n = [], 0, 0
        while n < len(records) and (n == 0 or self._tokens + tokens < self._segment_tokens):
            data.append(records[n].to_bytes())
            tokens += records[n].size
            n += 1
        content = b"".join(data)
        try:
            write_all(self._fd, content)
            os.fdatasync(self._fd)
        except OSError:
            with contextlib.suppress(OSError):  # or what follows a torn record would be taken for damage
                os.ftruncate(self._fd, self._size)
                os.lseek(self._fd, self._size, os.SEEK_SET)
            raise
        self._size += len(content)
        self._tokens += tokens
        return n

    def _begin_segment(self) -> None:
        """Begin a segment, name it in the manifest, and drop the oldest beyond the bound."""
        segments = list(self._sealed())
        name = segment_name(self._manifest.next)
        total = sum(entry.tokens for entry in segments)
        gone = []
        while segments and total - segments[0].tokens >= self._max_tokens:
            total -= segments[0].tokens
            gone.append(segments.pop(0))
        fd = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            write_all(fd, SEGMENT_HEADER)
            os.fsync(fd)
            self._replace(segments=(*segments, SegmentEntry(name=name)), next=self._manifest.next + 1)
        except OSError:
            os.close(fd)
            raise
        if self._fd is not None:
            os.close(self._fd)
        self._fd, self._size, self._tokens = fd, len(SEGMENT_HEADER), 0
        for entry in gone:
            with contextlib.suppress(OSError):
                (self.folder / entry.name).unlink(missing_ok=True)

    def _sealed(self) -> tuple[SegmentEntry, ...]:
        """Return the segments, with what is in the one that was appended to."""
        if self._fd is None:
            return self._manifest.segments
        *full, last = self._manifest.segments
        return (*full, SegmentEntry(name=last.name, size=self._size, tokens=self._tokens))

    def _replace(self, **changes: Any) -> None:
        manifest = self._manifest.model_copy(update=changes)
        manifest.write(self.folder / MANIFEST)
        self._manifest = manifest


def check_live(
    directory: Path, *, vocab_size: int, fingerprint: str | None, second_writer: Literal["refuse", "read"]
) -> None:
    """Refuse, before an engine starts, what `SegmentLog.open` would refuse. Changes nothing.

    Raises:
        DatastoreError: see `open_live`.
    """
    folder = Path(directory) / LIVE
    above = folder
    while not above.exists():
        above = above.parent
    if not above.is_dir():
        raise DatastoreError(f"{above} is a file, so nothing can be learnt in {folder}: choose another path")
    if second_writer == "refuse" and not os.access(above, os.W_OK | os.X_OK):
        raise DatastoreError(f"cannot write {above}: give this user access or choose another path")
    if not folder.exists():
        return
    manifest = LiveManifest.of(folder)
    if manifest is not None:
        manifest.check_fits(folder, vocab_size, fingerprint)
    if second_writer == "refuse" and (folder / LOCK).exists():
        lock = lock_writer(folder)
        if lock is None:
            raise _busy(folder)
        lock.release()


def forget(directory: Path, tenants: Sequence[str] = (), before: str | None = None) -> tuple[int, int]:
    """Erase learnt documents from the disk: of these tenants (none: of all), from before a time (None: of any).

    Args:
        directory: the store's.
        before: an ISO date or time; UTC unless it says otherwise.

    Returns:
        Documents and tokens erased.

    Raises:
        DatastoreError: nothing was ever learnt there, a writer lives, not a time, or the disk refuses.
    """
    folder = Path(directory) / LIVE
    end = float("inf")
    if before is not None:
        try:
            moment = datetime.fromisoformat(before)
        except ValueError:
            raise DatastoreError(
                f"{before!r} is not a time: write for instance 2026-01-31 or 2026-01-31T12:00"
            ) from None
        end = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000
    if LiveManifest.of(folder) is None:
        raise DatastoreError(f"{directory} has learnt nothing: correct the path")
    lock = lock_writer(folder)
    if lock is None:
        raise DatastoreError(f"a server is writing {folder}: stop it first")
    try:
        manifest = LiveManifest.read(folder / MANIFEST)
        digests = {tenant_digest(bytes.fromhex(manifest.key), name) for name in tenants}
        documents = tokens = 0
        parts: list[SegmentEntry | list[Record]] = []
        for entry in manifest.segments:
            records = scan_segment(folder / entry.name).records
            kept = [r for r in records if (digests and r.tenant not in digests) or r.milliseconds >= end]
            documents += len(records) - len(kept)
            tokens += sum(len(r.tokens) for r in records) - sum(len(r.tokens) for r in kept)
            if len(kept) == len(records):
                parts.append(entry)
            elif kept:
                parts.append(kept)
        with reporting("write", folder):
            if documents:
                replace_segments(folder, manifest, parts)
        return documents, tokens
    finally:
        lock.release()


def _busy(folder: Path) -> DatastoreError:
    return DatastoreError(
        f"another server writes {folder}: stop it, choose another datastore, "
        f"or let this one read only with live_second_writer 'read'"
    )
