"""`SegmentLog`: finished documents on disk, in append-only segments under an atomically replaced manifest.

    STORE/live/lock             held by the one writer while it lives
    STORE/live/manifest.json    the segments, oldest first; the last one is being appended to
    STORE/live/000001.seg       a header, then records

A record is one document: a header (count of tokens, time, tenant, checksums) and its tokens, int32. All of it is
little-endian, mode 0600. Suffix arrays are not stored: sorting is faster than proving that a stored order is right.
A record counts when its checksums match, so whatever a crash leaves of the last one is recognised and dropped.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import secrets
import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sssd_plugin.datastore.errors import DatastoreError, reporting
from sssd_plugin.datastore.format import LIVE

logger = logging.getLogger("freedraft.datastore")

MANIFEST: Final = "manifest.json"
LOCK: Final = "lock"
FORMAT: Final = "freedraft-live"
FORMAT_VERSION: Final = 1
SEGMENT_TOKENS = 1 << 20
FLUSH_SECONDS = 0.2
"""What arrived within the last so many seconds may be lost when the machine stops."""
_RETRY_SECONDS = 5.0
_MAX_PENDING = 4 << 20  # tokens kept for writing while the disk refuses

_FILE_HEADER = b"FDLIVE1\n"
_MAGIC = b"FDr1"
_HEADER = struct.Struct("<4sIQ16sI")  # magic, tokens, time in ms, tenant, CRC-32 of the tokens
_CRC = struct.Struct("<I")  # of the header
_HEADER_BYTES = _HEADER.size + _CRC.size
_REMEDY = "restore it, or remove the folder to start anew"


@dataclass(frozen=True, slots=True)
class Record:
    """A document. tenant: 16 bytes, or none; milliseconds: since 1970, when its request ended."""

    tenant: bytes
    milliseconds: int
    tokens: NDArray[np.int32]

    def to_bytes(self) -> bytes:
        payload = np.ascontiguousarray(self.tokens, "<i4").tobytes()
        header = _HEADER.pack(_MAGIC, len(self.tokens), self.milliseconds, self.tenant, zlib.crc32(payload))
        return header + _CRC.pack(zlib.crc32(header)) + payload


class SegmentEntry(BaseModel):
    """A segment; size and tokens are recorded once it is full."""

    model_config = ConfigDict(frozen=True)

    name: Annotated[str, Field(pattern=r"^\d{6,}\.seg$")]
    size: int | None = None
    tokens: int = 0


class LiveManifest(BaseModel):
    """What the folder holds. key: of the digests that stand for tenants' names."""

    model_config = ConfigDict(frozen=True)

    format: Literal["freedraft-live"] = FORMAT
    format_version: Literal[1] = FORMAT_VERSION
    vocab_size: int
    fingerprint: str | None = None
    key: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    next: int = 1
    segments: tuple[SegmentEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class Scan:
    """What is in a segment. end: where the last good record ends; damaged: bytes before that which are no good."""

    records: list[Record]
    end: int
    size: int
    damaged: int

    @property
    def tokens(self) -> int:
        return sum(len(record.tokens) + 1 for record in self.records)


class SegmentLog:
    """The documents of one live datastore on disk. Use `open`.

    `append` only queues; one thread writes what has come, every `FLUSH_SECONDS`. When the disk refuses, that is logged
    once, drafting goes on with what is in memory, and writing is tried again.

    Attributes:
        key: of the digests of tenants' names.
        writable: whether this process is the writer.
    """

    def __init__(self, folder: Path, manifest: LiveManifest, lock: int | None, max_tokens: int) -> None:
        self.folder = folder
        self.key = bytes.fromhex(manifest.key)
        self.writable = lock is not None
        self._manifest, self._lock_fd, self._max_tokens = manifest, lock, max_tokens
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
        *,
        vocab_size: int,
        fingerprint: str | None = None,
        max_tokens: int,
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
            lock = _take_lock(folder)
            if lock is None and second_writer == "refuse":
                raise DatastoreError(_busy(folder))
            if lock is None:
                logger.warning("freedraft: another process writes %s: reading only, learning in memory", folder)
        try:
            manifest = _read_manifest(folder)
            if manifest is None:
                manifest = LiveManifest(vocab_size=vocab_size, fingerprint=fingerprint, key=secrets.token_hex(16))
                if lock is not None:
                    _write_manifest(folder, manifest)
            _check_fits(folder, manifest, vocab_size, fingerprint)
            log = cls(folder, manifest, lock, max_tokens)
            for attempt in range(5):
                log._recover()
                # While a reader reads, the writer may replace segments.
                now = manifest if lock is not None else _read_manifest(folder) or manifest
                if now == manifest or attempt == 4:
                    break
                manifest = now
                log = cls(folder, manifest, lock, max_tokens)
        except BaseException:
            if lock is not None:
                os.close(lock)
            raise
        return log

    def take_recovered(self) -> list[Record]:
        """The documents that were there, oldest first; the second call returns none."""
        records, self._recovered = self._recovered, []
        return records

    def append(self, tenant: bytes, tokens: NDArray[np.int32]) -> None:
        """Write a document soon. tenant: 16 bytes, or none; tokens: int32 [n], copied."""
        if not self.writable:
            return
        record = Record(tenant or bytes(16), time.time_ns() // 1_000_000, np.array(tokens, np.int32))
        with self._mutex:
            self._pending.append(record)
            self._pending_tokens += len(record.tokens)
            while self._pending_tokens > _MAX_PENDING and len(self._pending) > 1:
                self._pending_tokens -= len(self._pending.popleft().tokens)
        if self._thread is None:
            self._thread = threading.Thread(target=self._write_often, name="freedraft-log", daemon=True)
            self._thread.start()

    def flush(self) -> bool:
        """Write what is queued, to the disk itself; whether the disk took it."""
        with self._writing:
            return self._write_pending()

    def close(self) -> None:
        """Write what is queued and let go of the lock; may be called twice."""
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
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None
        self.writable = False

    def _recover(self) -> None:
        entries = []
        whole = True
        for entry in self._manifest.segments:
            path = self.folder / entry.name
            last = entry.size is None
            try:
                scan = scan_segment(path)
            except DatastoreError as error:
                logger.error("freedraft: %s; going on without what it holds", error)
                entries.append(entry)
                whole = False
                continue
            self._recovered += scan.records
            whole = whole and not scan.damaged
            if scan.damaged:
                logger.error("freedraft: %s is damaged: %d bytes of it are left out", path, scan.damaged)
            if not last and entry.size is not None and scan.end < entry.size:
                logger.error("freedraft: %s is truncated: %d bytes are missing", path, entry.size - scan.end)
            if last and scan.end < scan.size and self.writable:
                logger.warning(
                    "freedraft: %s ends in a document that was being written when its writer stopped: "
                    "its %d bytes are dropped",
                    path,
                    scan.size - scan.end,
                )
                with reporting("write", path):
                    os.truncate(path, scan.end)
            entries.append(entry if not last else SegmentEntry(name=entry.name, size=scan.end, tokens=scan.tokens))
        if self.writable:
            # What is there stays as it is; a new segment is begun with the first document.
            if tuple(entries) != self._manifest.segments:
                with reporting("write", self.folder):
                    self._replace(segments=tuple(entries))
            self._remove_unnamed()
            if whole and len(entries) > 64 + 2 * self._max_tokens // self._segment_tokens:
                with reporting("write", self.folder):
                    self._compact()

    def _compact(self) -> None:
        """Many restarts leave many small segments: make full ones of them."""
        old, new = self._manifest.segments, []
        number = self._manifest.next
        part: list[Record] = []
        for i, record in enumerate(self._recovered):
            part.append(record)
            if i + 1 == len(self._recovered) or sum(len(r.tokens) + 1 for r in part) >= self._segment_tokens:
                name = f"{number:06d}.seg"
                number += 1
                size, tokens = _write_segment(self.folder / name, part)
                new.append(SegmentEntry(name=name, size=size, tokens=tokens))
                part = []
        self._replace(segments=tuple(new), next=number)
        for entry in old:
            (self.folder / entry.name).unlink(missing_ok=True)

    def _remove_unnamed(self) -> None:
        named = {entry.name for entry in self._manifest.segments}
        with contextlib.suppress(OSError):
            for path in self.folder.glob("*.seg"):
                if path.name not in named:
                    path.unlink(missing_ok=True)

    def _write_often(self) -> None:
        while not self._stop.wait(FLUSH_SECONDS):
            if self._pending and time.monotonic() >= self._retry_at:
                with self._writing:
                    self._write_pending()

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
        """Append as many documents as the segment takes, at least one; how many."""
        if self._fd is None or self._tokens >= self._segment_tokens:
            self._begin_segment()
        assert self._fd is not None
        data, tokens, n = [], 0, 0
        while n < len(records) and (n == 0 or self._tokens + tokens < self._segment_tokens):
            data.append(records[n].to_bytes())
            tokens += len(records[n].tokens) + 1
            n += 1
        content = b"".join(data)
        try:
            _write_all(self._fd, content)
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
        """Begin a segment, name it in the manifest, and let go of the oldest beyond the bound."""
        segments = list(self._sealed())
        name = f"{self._manifest.next:06d}.seg"
        total = sum(entry.tokens for entry in segments)
        gone = []
        while segments and total - segments[0].tokens >= self._max_tokens:
            total -= segments[0].tokens
            gone.append(segments.pop(0))
        fd = os.open(self.folder / name, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write_all(fd, _FILE_HEADER)
            os.fsync(fd)
            self._replace(segments=(*segments, SegmentEntry(name=name)), next=self._manifest.next + 1)
        except OSError:
            os.close(fd)
            raise
        if self._fd is not None:
            os.close(self._fd)
        self._fd, self._size, self._tokens = fd, len(_FILE_HEADER), 0
        for entry in gone:
            with contextlib.suppress(OSError):
                (self.folder / entry.name).unlink(missing_ok=True)

    def _sealed(self) -> tuple[SegmentEntry, ...]:
        """The segments, with what is in the one that was appended to."""
        if self._fd is None:
            return self._manifest.segments
        *full, last = self._manifest.segments
        return (*full, SegmentEntry(name=last.name, size=self._size, tokens=self._tokens))

    def _replace(self, **changes: Any) -> None:
        manifest = self._manifest.model_copy(update=changes)
        _write_manifest(self.folder, manifest)
        self._manifest = manifest


def check_live(
    directory: Path, *, vocab_size: int, fingerprint: str | None, second_writer: Literal["refuse", "read"]
) -> None:
    """Tell, before an engine starts, that `SegmentLog.open` would fail. Changes nothing.

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
    manifest = _read_manifest(folder)
    if manifest is not None:
        _check_fits(folder, manifest, vocab_size, fingerprint)
    if second_writer == "refuse" and (folder / LOCK).exists():
        lock = _take_lock(folder)
        if lock is None:
            raise DatastoreError(_busy(folder))
        os.close(lock)


def forget(directory: Path, wanted: Callable[[Record], bool]) -> tuple[int, int]:
    """Erase documents from the disk; nobody may be writing there.

    Args:
        directory: the store's.
        wanted: says of each document whether it stays.

    Returns:
        Documents and tokens erased.

    Raises:
        DatastoreError: nothing was ever learnt there, a writer lives, or the disk refuses.
    """
    folder = Path(directory) / LIVE
    if not folder.is_dir():
        raise DatastoreError(f"{directory} has learnt nothing (no {LIVE}): correct the path")
    lock = _take_lock(folder)
    if lock is None:
        raise DatastoreError(f"a server is writing {folder}: stop it first")
    try:
        manifest = _read_manifest(folder)
        if manifest is None:
            return 0, 0
        documents = tokens = 0
        segments, gone, number = [], [], manifest.next
        with reporting("write", folder):
            for entry in manifest.segments:
                records = scan_segment(folder / entry.name).records
                kept = [record for record in records if wanted(record)]
                if len(kept) == len(records):
                    segments.append(entry)
                    continue
                documents += len(records) - len(kept)
                tokens += sum(len(r.tokens) for r in records) - sum(len(r.tokens) for r in kept)
                gone.append(folder / entry.name)
                if kept:
                    name = f"{number:06d}.seg"
                    number += 1
                    size, count = _write_segment(folder / name, kept)
                    segments.append(SegmentEntry(name=name, size=size, tokens=count))
            if gone:
                _write_manifest(folder, manifest.model_copy(update={"segments": tuple(segments), "next": number}))
            for path in gone:
                path.unlink(missing_ok=True)
            _fsync_folder(folder)
        return documents, tokens
    finally:
        os.close(lock)


def live_key(directory: Path) -> bytes | None:
    """The key of the digests of tenants' names; None if nothing was ever learnt there.

    Raises:
        DatastoreError: the manifest cannot be read.
    """
    manifest = _read_manifest(Path(directory) / LIVE)
    return bytes.fromhex(manifest.key) if manifest else None


def scan_segment(path: Path) -> Scan:
    """Read a segment; records whose checksums do not match are left out.

    Raises:
        DatastoreError: it is missing, cannot be read, or is no segment.
    """
    with reporting("read", path):
        data = path.read_bytes()
    if data[: len(_FILE_HEADER)] != _FILE_HEADER:
        if len(data) < len(_FILE_HEADER):
            return Scan([], 0, len(data), 0)
        raise DatastoreError(f"{path} is no segment of a live datastore: {_REMEDY}")
    records: list[Record] = []
    end, damaged = len(_FILE_HEADER), 0
    for record, start, stop in _records(data):
        damaged += start - end
        end = stop
        if record is None:
            damaged += stop - start
        else:
            records.append(record)
    return Scan(records, end, len(data), damaged)


def _records(data: bytes) -> Iterator[tuple[Record | None, int, int]]:
    """(record, start, end) of all whose header is good; None for the record where its tokens are not."""
    at = len(_FILE_HEADER)
    while (at := data.find(_MAGIC, at)) >= 0 and at + _HEADER_BYTES <= len(data):
        header = data[at : at + _HEADER.size]
        _, n, milliseconds, tenant, crc = _HEADER.unpack(header)
        start = at + _HEADER_BYTES
        if zlib.crc32(header) != _CRC.unpack_from(data, at + _HEADER.size)[0]:
            at += 1
            continue
        end = start + 4 * n
        if end > len(data):
            return  # torn
        payload = data[start:end]
        good = zlib.crc32(payload) == crc
        if not good and end == len(data):
            return  # torn too: the file had its length before its contents
        tokens = np.frombuffer(payload, "<i4").astype(np.int32)
        yield Record(tenant if any(tenant) else b"", milliseconds, tokens) if good else None, at, end
        at = end


def _write_segment(path: Path, records: list[Record]) -> tuple[int, int]:
    """Write a whole segment; its size and tokens."""
    data = b"".join(
        [_FILE_HEADER, *(Record(r.tenant or bytes(16), r.milliseconds, r.tokens).to_bytes() for r in records)]
    )
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        _write_all(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    return len(data), sum(len(record.tokens) + 1 for record in records)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _take_lock(folder: Path) -> int | None:
    """Descriptor that holds the writer's lock; None if another process has it."""
    with reporting("write", folder / LOCK):
        fd = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    except OSError:  # a file system without locks
        logger.warning("freedraft: %s is on a file system without locks: see that only one server writes it", folder)
    return fd


def _busy(folder: Path) -> str:
    return (
        f"another server writes {folder}: stop it, choose another datastore, "
        f"or let this one read only with live_second_writer 'read'"
    )


def _check_fits(folder: Path, manifest: LiveManifest, vocab_size: int, fingerprint: str | None) -> None:
    other = manifest.fingerprint is not None and fingerprint is not None and manifest.fingerprint != fingerprint
    if other or manifest.vocab_size > vocab_size:
        raise DatastoreError(
            f"{folder} was learnt with another model's tokenizer: choose another datastore, or remove this folder"
        )


def _checksum(content: dict[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(content, sort_keys=True, separators=(',', ':')).encode()):08x}"


def _write_manifest(folder: Path, manifest: LiveManifest) -> None:
    content = manifest.model_dump(mode="json")
    content["checksum"] = _checksum(content)
    temporary = folder / f".{MANIFEST}.new"
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        _write_all(fd, json.dumps(content, indent=1).encode())
        os.fsync(fd)
    finally:
        os.close(fd)
    temporary.replace(folder / MANIFEST)
    _fsync_folder(folder)


def _fsync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _read_manifest(folder: Path) -> LiveManifest | None:
    """The manifest of a live folder; None if it has none."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        if folder.is_dir() and any(folder.glob("*.seg")):
            raise DatastoreError(f"{path} is missing though there are segments: {_REMEDY}") from None
        return None
    except OSError as error:
        raise DatastoreError(f"cannot read {path}: {error.strerror}; give this user access") from None
    except ValueError:
        raise DatastoreError(f"{path} is corrupted: not JSON; {_REMEDY}") from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise DatastoreError(f"{path} does not describe a live datastore: {_REMEDY}")
    version = content.get("format_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise DatastoreError(
            f"{path} has format version {version}, newer than the {FORMAT_VERSION} that this freedraft reads: "
            f"upgrade freedraft, or choose another datastore"
        )
    if content.pop("checksum", None) != _checksum(content):
        raise DatastoreError(f"{path} is corrupted: its checksum does not match; {_REMEDY}")
    try:
        return LiveManifest.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise DatastoreError(f"{path} is not a valid manifest ({first['loc']}: {first['msg']}): {_REMEDY}") from None


def when(text: str) -> int:
    """Milliseconds since 1970 of an ISO date or time; UTC unless it says otherwise.

    Raises:
        DatastoreError: not a time.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise DatastoreError(f"{text!r} is not a time: write for instance 2026-01-31 or 2026-01-31T12:00") from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1000)
