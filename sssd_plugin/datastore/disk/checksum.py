"""Checksummed files: a CRC-32 per block, so that damage is found in parallel and located."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from sssd_plugin.datastore.errors import REBUILD, DatastoreError, reporting

BLOCK_BYTES = 64 << 20
_READ_BYTES = 1 << 20
_ITEMS = 1 << 20


class FileEntry(BaseModel, frozen=True):
    """What a manifest records of a file: its size in bytes and the CRC-32 of each block of `BLOCK_BYTES`, in hex."""

    size: Annotated[int, Field(ge=0)]
    crc32: tuple[Annotated[str, Field(pattern="^[0-9a-f]{8}$")], ...]


class ChecksummedFile:
    """Writes a new file of mode 0600 and its checksums in one pass; on disk when closed.

    Raises:
        DatastoreError: the file exists already or cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._finished: list[str] = []
        self._crc = 0
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
            self.size += len(part)
            if self.size % BLOCK_BYTES == 0:
                self._finished.append(f"{self._crc:08x}")
                self._crc = 0
            view = view[len(part) :]

    def close(self) -> FileEntry:
        """Flush to the disk and return what to record."""
        with reporting("write", self.path):
            os.fsync(self._file.fileno())
            self._file.close()
        tail = [f"{self._crc:08x}"] if self.size % BLOCK_BYTES else []
        return FileEntry(size=self.size, crc32=(*self._finished, *tail))

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


def check_contents(files: Iterable[tuple[Path, FileEntry]]) -> None:
    """Raise `DatastoreError` at the first block that differs from its checksum; all blocks are read, in parallel."""
    blocks = [(path, i, crc) for path, entry in files for i, crc in enumerate(entry.crc32)]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        list(pool.map(_check_block, blocks))  # cancels what is left at the first that raises


def _check_block(block: tuple[Path, int, str]) -> None:
    path, index, expected = block
    crc, left, start = 0, BLOCK_BYTES, index * BLOCK_BYTES
    buffer = memoryview(bytearray(_READ_BYTES))
    with reporting("read", path), path.open("rb", buffering=0) as file:
        file.seek(start)
        while left and (n := file.readinto(buffer[: min(left, _READ_BYTES)])):
            crc = zlib.crc32(buffer[:n], crc)  # lets other threads run meanwhile
            left -= n
    if f"{crc:08x}" != expected:
        raise DatastoreError(
            f"{path} is corrupted: checksum of the block at byte {start} is {crc:08x}, not {expected}; "
            f"restore it, or {REBUILD}"
        )
