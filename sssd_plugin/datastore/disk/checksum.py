"""Checksummed files: a CRC-32 and a SHA-256 per block, so that damage is located, and found in parallel. The numbers in
them are checked in the same pass, since compiled code reads them unchecked."""

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
_STEP_BYTES = 1 << 20


class FileEntry(BaseModel, frozen=True):
    """A file in a manifest: its size in bytes, and the CRC-32 and SHA-256 of each block of `BLOCK_BYTES`, in hex. Older
    files have no SHA-256."""

    size: Annotated[int, Field(ge=0)]
    crc32: tuple[Annotated[str, Field(pattern="^[0-9a-f]{8}$")], ...]
    sha256: tuple[Annotated[str, Field(pattern="^[0-9a-f]{64}$")], ...] = ()


class Bounds(NamedTuple):
    """The least and the greatest number that a file of int32 may hold, and whether none may be below the one before."""

    low: int
    high: int
    rising: bool = False


Checked = tuple[Path, FileEntry, Bounds]


class ChecksummedFile:
    """Writes a new file of mode 0600 and its checksums in one pass; on disk when closed.

    Raises:
        DatastoreError: the file exists already or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.size = path, 0
        self._sums: list[tuple[str, str]] = []
        self._crc, self._sha = 0, hashlib.sha256()
        with reporting("write", path):
            # Unbuffered: callers hand over large arrays.
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._file = os.fdopen(fd, "wb", buffering=0)

    def write(self, data: NDArray[Any]) -> None:
        """Append the bytes of a contiguous array."""
        view = data.view(np.uint8).data
        while view:
            part = view[: min(_STEP_BYTES, BLOCK_BYTES - self.size % BLOCK_BYTES)]
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
        crc32, sha256 = zip(*self._sums, strict=True) if self._sums else ((), ())
        return FileEntry(size=self.size, crc32=crc32, sha256=sha256)

    def _end_block(self) -> None:
        self._sums.append((f"{self._crc:08x}", self._sha.hexdigest()))
        self._crc, self._sha = 0, hashlib.sha256()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()


def write_array(path: Path, array: NDArray[np.integer]) -> FileEntry:
    """Write a new file of little-endian int32, and return what to record; errors as of `ChecksummedFile`."""
    with ChecksummedFile(path) as file:
        file.write(np.ascontiguousarray(array, "<i4"))
        return file.close()


def check(files: Iterable[Checked], *, contents: bool = True, pinned: bool = False) -> None:
    """Raise `DatastoreError` at the first file that is missing or has another size, or block that differs from its
    checksum or holds a number out of bounds; all blocks are read, in parallel.

    Args:
        contents: False: sizes only.
        pinned: whether to compare SHA-256 instead of CRC-32, which an attacker can match.
    """
    blocks = []
    for path, entry, bounds in files:
        with reporting("read", path):
            if not path.exists():
                raise DatastoreError(f"{path} is missing: restore it, or {REBUILD}")
            size = path.stat().st_size
        if size != entry.size:
            state = "truncated" if size < entry.size else "corrupted (too long)"
            raise DatastoreError(f"{path} is {state}: {size} bytes instead of {entry.size}; restore it, or {REBUILD}")
        if pinned and len(entry.sha256) != len(entry.crc32):
            raise DatastoreError(f"{path} has no SHA-256 in the manifest, so a digest cannot pin it: {REBUILD}")
        sums = entry.sha256 if pinned else entry.crc32
        blocks += [(path, index * BLOCK_BYTES, expected, bounds) for index, expected in enumerate(sums)]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(_check_block, blocks if contents else ()))  # cancels what is left at the first that raises


def _check_block(block: tuple[Path, int, str, Bounds]) -> None:
    path, start, expected, bounds = block
    pinned = len(expected) > 8
    crc, sha, in_bounds, before = 0, hashlib.sha256(), True, bounds.low
    with reporting("read", path), path.open("rb") as file:
        if start:
            file.seek(start - 4)
            before = int.from_bytes(file.read(4), "little", signed=True)
        for at in range(0, BLOCK_BYTES, _STEP_BYTES):
            numbers = np.fromfile(file, "<i4", min(_STEP_BYTES, BLOCK_BYTES - at) // 4)
            if not len(numbers):
                break
            if pinned:
                sha.update(numbers.data)  # these let other threads run meanwhile
            else:
                crc = zlib.crc32(numbers.data, crc)
            in_bounds &= bounds.low <= int(numbers.min()) and int(numbers.max()) <= bounds.high
            if bounds.rising:
                in_bounds &= before <= int(numbers[0]) and bool((numbers[1:] >= numbers[:-1]).all())
                before = int(numbers[-1])
    found = sha.hexdigest() if pinned else f"{crc:08x}"
    if found != expected:
        raise DatastoreError(
            f"{path} is corrupted: checksum of the block at byte {start} is {found}, not {expected}; "
            f"restore it, or {REBUILD}"
        )
    if not in_bounds:
        limits = f"outside {bounds.low}..{bounds.high}" + (" or that do not rise" if bounds.rising else "")
        raise DatastoreError(
            f"{path} holds numbers {limits} in the block at byte {start}: take the store from whom you trust"
        )
