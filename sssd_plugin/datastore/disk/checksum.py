"""Files of numbers with digests per block, to locate damage and verify in parallel. The same pass checks the numbers,
since compiled code reads them unchecked."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from freedraft.files import write_all
from sssd_plugin.datastore.errors import REBUILD, DatastoreError, reporting

BLOCK_BYTES = 64 << 20
_STEP_BYTES = 1 << 20
_THREADS = min(8, os.cpu_count() or 1)


class FileEntry(BaseModel, frozen=True):
    """A file in a manifest: its size in bytes, and digests of each block of `BLOCK_BYTES`, in hex. Readers compare
    SHA-256 if present; older files and readers have CRC-32 only."""

    size: Annotated[int, Field(ge=0)]
    crc32: tuple[Annotated[str, Field(pattern="^[0-9a-f]{8}$")], ...]
    sha256: tuple[Annotated[str, Field(pattern="^[0-9a-f]{64}$")], ...] = ()


class Bounds(NamedTuple):
    """Minimum and maximum of a file of int32, and whether its numbers must not descend."""

    low: int = -(1 << 31)
    high: int = (1 << 31) - 1
    rising: bool = False


Checked = tuple[Path, FileEntry, Bounds]


class _Crc32:
    """CRC-32 with the interface of `hashlib`."""

    _value = 0

    def update(self, data: memoryview) -> None:
        self._value = zlib.crc32(data, self._value)

    def hexdigest(self) -> str:
        return f"{self._value:08x}"


class NewFile(FileIO):
    """A new file of mode 0600; `DatastoreError` where it exists already or cannot be written."""

    def __init__(self, path: Path) -> None:
        with reporting("write", path):
            super().__init__(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600))

    def append(self, array: NDArray[np.int32]) -> None:
        """Write a contiguous array."""
        with reporting("write", Path(self.name)):
            write_all(self.fileno(), array.view(np.uint8).data)


def write_array(path: Path, array: NDArray[np.integer]) -> FileEntry:
    """Write a new file of little-endian int32, and return its entry; errors: see `NewFile`."""
    with NewFile(path) as file:
        file.append(np.ascontiguousarray(array, "<i4"))
    return record(path)


def record(path: Path) -> FileEntry:
    """Flush a written file to the disk, and return its entry."""
    with reporting("write", path), path.open("rb") as file:
        os.fsync(file.fileno())
    size = path.stat().st_size
    blocks = range(0, size, BLOCK_BYTES)
    with ThreadPoolExecutor(_THREADS) as pool:
        crc32, sha256 = (
            tuple(found for found, _ in pool.map(partial(_scan, path, kind, Bounds()), blocks))
            for kind in (_Crc32, hashlib.sha256)
        )
    return FileEntry(size=size, crc32=crc32, sha256=sha256)


def check(files: Iterable[Checked], *, contents: bool = True) -> None:
    """Raise `DatastoreError` at the first missing file, wrong size, block with another digest, or number out of bounds;
    reads all blocks, in parallel. contents: False: check sizes only."""
    blocks = []
    for path, entry, bounds in files:
        with reporting("read", path):
            if not path.exists():
                raise DatastoreError(f"{path} is missing: restore it, or {REBUILD}")
            size = path.stat().st_size
        if size != entry.size:
            state = "truncated" if size < entry.size else "corrupted (too long)"
            raise DatastoreError(f"{path} is {state}: {size} bytes instead of {entry.size}; restore it, or {REBUILD}")
        blocks += [(path, entry, bounds, index) for index in range(len(entry.crc32))]

    def check_block(path: Path, entry: FileEntry, bounds: Bounds, index: int) -> None:
        expected, start = (entry.sha256 or entry.crc32)[index], index * BLOCK_BYTES
        found, in_bounds = _scan(path, hashlib.sha256 if entry.sha256 else _Crc32, bounds, start)
        if found != expected:
            differs = f"checksum of the block at byte {start} is {found}, not {expected}"
            raise DatastoreError(f"{path} is corrupted: {differs}; restore it, or {REBUILD}")
        if not in_bounds:
            limits = f"outside {bounds.low}..{bounds.high}" + (" or descending" if bounds.rising else "")
            where = f"in the block at byte {start}"
            raise DatastoreError(f"{path} holds numbers {limits} {where}: take the store from whom you trust")

    with ThreadPoolExecutor(_THREADS) as pool:  # the first error cancels the rest
        list(pool.map(lambda block: check_block(*block), blocks if contents else ()))


def _scan(path: Path, hashing: Callable[[], Any], bounds: Bounds, start: int) -> tuple[str, bool]:
    """Return the digest of the block at `start`, and whether its numbers are in bounds."""
    digest, in_bounds, before = hashing(), True, bounds.low
    with reporting("read", path), path.open("rb") as file:
        if start:
            file.seek(start - 4)
            before = int.from_bytes(file.read(4), "little", signed=True)
        for at in range(0, BLOCK_BYTES, _STEP_BYTES):
            numbers = np.fromfile(file, "<i4", min(_STEP_BYTES, BLOCK_BYTES - at) // 4)
            if not len(numbers):
                break
            digest.update(numbers.data)  # releases the GIL
            in_bounds &= bounds.low <= int(numbers.min()) and int(numbers.max()) <= bounds.high
            if bounds.rising:
                in_bounds &= before <= int(numbers[0]) and bool((numbers[1:] >= numbers[:-1]).all())
                before = int(numbers[-1])
    return digest.hexdigest(), in_bounds
