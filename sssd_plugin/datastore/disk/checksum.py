"""Files of numbers with digests per block, to locate damage and verify in parallel. The same pass checks the numbers,
since compiled code reads them unchecked."""

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, Field

from freedraft.files import write_all
from sssd_plugin.datastore.errors import REBUILD, DatastoreError, reporting

BLOCK_BYTES = 64 << 20
_STEP_BYTES = 1 << 20
_THREADS = min(8, os.cpu_count() or 1)


class FileEntry(BaseModel, frozen=True):
    """A file in a manifest: its size in bytes, and the digest of each block of `BLOCK_BYTES`, in hex."""

    size: Annotated[int, Field(ge=0)]
    sha256: tuple[Annotated[str, Field(pattern="^[0-9a-f]{64}$")], ...]


class Bounds(NamedTuple):
    """Minimum and maximum of a file of int32, and whether its numbers must not descend."""

    low: int = -(1 << 31)
    high: int = (1 << 31) - 1
    rising: bool = False


Checked = tuple[Path, FileEntry, Bounds]


class NewFile(FileIO):
    """A new file of mode 0600; `DatastoreError` where it exists already or cannot be written."""

    def __init__(self, path: Path) -> None:
        with reporting("write", path):
            super().__init__(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600))

    def append(self, array: NDArray[np.int32]) -> None:  # contiguous
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
    with ThreadPoolExecutor(_THREADS) as pool:
        blocks = pool.map(partial(_scan, path, Bounds()), range(0, size, BLOCK_BYTES))
    return FileEntry(size=size, sha256=tuple(sha256 for sha256, _ in blocks))


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
        blocks += [(path, entry, bounds, index) for index in range(len(entry.sha256))]

    def check_block(path: Path, entry: FileEntry, bounds: Bounds, index: int) -> None:
        expected, start = entry.sha256[index], index * BLOCK_BYTES
        found, in_bounds = _scan(path, bounds, start)
        if found != expected:
            differs = f"checksum of the block at byte {start} is {found}, not {expected}"
            raise DatastoreError(f"{path} is corrupted: {differs}; restore it, or {REBUILD}")
        if not in_bounds:
            limits = f"outside {bounds.low}..{bounds.high}" + (" or descending" if bounds.rising else "")
            where = f"in the block at byte {start}"
            raise DatastoreError(f"{path} holds numbers {limits} {where}: take the store from whom you trust")

    with ThreadPoolExecutor(_THREADS) as pool:  # the first error cancels the rest
        list(pool.map(lambda block: check_block(*block), blocks if contents else ()))


def _scan(path: Path, bounds: Bounds, start: int) -> tuple[str, bool]:
    sha256, in_bounds, before = hashlib.sha256(), True, bounds.low
    with reporting("read", path), path.open("rb") as file:
        if start:
            file.seek(start - 4)
            before = int.from_bytes(file.read(4), "little", signed=True)
        for at in range(0, BLOCK_BYTES, _STEP_BYTES):
            numbers = np.fromfile(file, "<i4", min(_STEP_BYTES, BLOCK_BYTES - at) // 4)
            if not len(numbers):
                break
            sha256.update(numbers.data)  # releases the GIL
            in_bounds &= bounds.low <= int(numbers.min()) and int(numbers.max()) <= bounds.high
            if bounds.rising:
                in_bounds &= before <= int(numbers[0]) and bool((numbers[1:] >= numbers[:-1]).all())
                before = int(numbers[-1])
    return sha256.hexdigest(), in_bounds
