"""Checksummed files: a CRC-32 and a SHA-256 per block, so that damage is found in parallel and located. What they hold
is checked in the same pass, since compiled code reads it unchecked."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from sssd_plugin.datastore.errors import REBUILD, DatastoreError, reporting

BLOCK_BYTES = 64 << 20
_READ_BYTES = 1 << 20
_ITEMS = 1 << 20


class FileEntry(BaseModel, frozen=True):
    """What a manifest records of a file: its size in bytes, and the CRC-32 and SHA-256 of each block of `BLOCK_BYTES`,
    in hex. Older files have no SHA-256."""

    size: Annotated[int, Field(ge=0)]
    crc32: tuple[Annotated[str, Field(pattern="^[0-9a-f]{8}$")], ...]
    sha256: tuple[Annotated[str, Field(pattern="^[0-9a-f]{64}$")], ...] = ()


class Bounds(NamedTuple):
    """What numbers a file of int32 may hold.

    Attributes:
        low, high: the least and the greatest.
        rising: whether none may be below the one before it.
    """

    low: int
    high: int
    rising: bool = False


ANY = Bounds(-(1 << 31), (1 << 31) - 1)


class ChecksummedFile:
    """Writes a new file of mode 0600 and its checksums in one pass; on disk when closed.

    Raises:
        DatastoreError: the file exists already or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._finished: list[tuple[str, str]] = []
        self._crc, self._sha = 0, hashlib.sha256()
        with reporting("write", path):
            # Unbuffered: callers hand over large arrays.
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._file = os.fdopen(fd, "wb", buffering=0)

    def write(self, data: NDArray[Any]) -> None:
        """Append the bytes of a contiguous array."""
        view = data.view(np.uint8).data
        while view:
            part = view[: min(_READ_BYTES, BLOCK_BYTES - self.size % BLOCK_BYTES)]
            with reporting("write", self.path):
                part = part[: self._file.write(part)]
            self._crc = zlib.crc32(part, self._crc)
            self._sha.update(part)
            self.size += len(part)
            if self.size % BLOCK_BYTES == 0:
                self._end_block()
            view = view[len(part) :]

    def close(self) -> FileEntry:
        """Flush to the disk and return what to record."""
        with reporting("write", self.path):
            os.fsync(self._file.fileno())
            self._file.close()
        if self.size % BLOCK_BYTES:
            self._end_block()
        crcs, shas = zip(*self._finished, strict=True) if self._finished else ((), ())
        return FileEntry(size=self.size, crc32=crcs, sha256=shas)

    def _end_block(self) -> None:
        self._finished.append((f"{self._crc:08x}", self._sha.hexdigest()))
        self._crc, self._sha = 0, hashlib.sha256()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def write_array(path: Path, array: NDArray[np.integer]) -> FileEntry:
    """Write a new file of little-endian int32, and return what to record; errors as of `ChecksummedFile`."""
    with ChecksummedFile(path) as file:
        for start in range(0, len(array), _ITEMS):
            file.write(np.ascontiguousarray(array[start : start + _ITEMS], "<i4"))
        return file.close()


def check_size(path: Path, entry: FileEntry) -> None:
    """Raise `DatastoreError` unless `path` is a file of the recorded size."""
    with reporting("read", path):
        if not path.exists():
            raise DatastoreError(f"{path} is missing: restore it, or {REBUILD}")
        size = path.stat().st_size
    if size != entry.size:
        state = "truncated" if size < entry.size else "corrupted (too long)"
        raise DatastoreError(f"{path} is {state}: {size} bytes instead of {entry.size}; restore it, or {REBUILD}")


def check_contents(files: Iterable[tuple[Path, FileEntry, Bounds]], *, pinned: bool = False) -> None:
    """Raise `DatastoreError` at the first block that differs from its checksum or holds a number out of bounds; all
    blocks are read, in parallel.

    Args:
        pinned: whether to compare SHA-256 instead of CRC-32, which an attacker can match.
    """
    blocks = []
    for path, entry, bounds in files:
        if pinned and len(entry.sha256) != len(entry.crc32):
            raise DatastoreError(f"{path} has no SHA-256 in the manifest, so a digest cannot pin it: {REBUILD}")
        sums = entry.sha256 if pinned else entry.crc32
        blocks += [(path, i, expected, bounds) for i, expected in enumerate(sums)]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(_check_block, blocks))  # cancels what is left at the first that raises


def _check_block(block: tuple[Path, int, str, Bounds]) -> None:
    path, index, expected, bounds = block
    crc, sha, left, start = 0, hashlib.sha256(), BLOCK_BYTES, index * BLOCK_BYTES
    pinned = len(expected) > 8
    buffer = memoryview(bytearray(_READ_BYTES))
    low, high, last = bounds.high, bounds.low, bounds.low
    rises = True
    with reporting("read", path), path.open("rb") as file:
        if start and bounds.rising:
            file.seek(start - 4)
            last = int.from_bytes(file.read(4), "little", signed=True)
        file.seek(start)
        while left and (n := file.readinto(buffer[: min(left, _READ_BYTES)])):
            part = buffer[:n]
            if pinned:
                sha.update(part)  # these let other threads run meanwhile
            else:
                crc = zlib.crc32(part, crc)
            numbers = np.frombuffer(part[: n // 4 * 4], "<i4")
            if len(numbers):
                low, high = min(low, int(numbers.min())), max(high, int(numbers.max()))
                if bounds.rising:
                    rises &= last <= numbers[0] and bool((numbers[1:] >= numbers[:-1]).all())
                    last = int(numbers[-1])
            left -= n
    found = sha.hexdigest() if pinned else f"{crc:08x}"
    if found != expected:
        raise DatastoreError(
            f"{path} is corrupted: checksum of the block at byte {start} is {found}, not {expected}; "
            f"restore it, or {REBUILD}"
        )
    if low < bounds.low or high > bounds.high or not rises:
        wrong = "numbers that do not rise" if not rises else f"numbers outside {bounds.low}..{bounds.high}"
        raise DatastoreError(f"{path} holds {wrong} in the block at byte {start}: take the store from whom you trust")
