"""Sorting the suffixes of sub-indices, in threads, and the memory that a build may use for it."""

from __future__ import annotations

import re
import threading
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import ByteSize, TypeAdapter, ValidationError

from sssd_plugin.datastore.disk.checksum import record, write_array
from sssd_plugin.datastore.disk.format import Role, SubIndexEntry, file_name
from sssd_plugin.datastore.errors import DatastoreError, reporting
from sssd_plugin.datastore.index.suffix_sort import PAD, can_sort_bytes, sort_bytes, sorted_arrays, with_tables

DEFAULT_MEMORY = 2 << 30
SORT_BYTES = 9  # least memory per token of sorting a sub-index, by `suffix_sort`: tokens, their order, a sparse index
_MIN_SORT_BYTES = SORT_BYTES << 20
_READING_BYTES = 160 << 20  # tokenising a batch, buffers, and allocator overhead

Int32 = NDArray[np.int32]


def sort(tokens: Int32, direct: int, memory: int) -> dict[Role, Int32]:
    """Return the arrays of a `SubIndex` from its tokens (int32 [n + PAD]), with `direct` buckets. Uses libdivsufsort if
    it is installed and `memory` bytes suffice for it, tokens included."""
    n, largest = len(tokens) - PAD, int(tokens.max())
    if can_sort_bytes(n, largest, memory):
        arrays = with_tables(tokens, sort_bytes(tokens, largest), direct)
    else:
        arrays = sorted_arrays(tokens, direct)
    return {"suffix_array": arrays[1], "bucket_starts": arrays[2], "sparse_index": arrays[3]}


def start_sorting(folder: Path, direct: int, memory: int) -> Future[SubIndexEntry]:
    """Sort the sub-index in `folder` within `memory` bytes and write its arrays, by compiled code without the GIL.
    Returns a future of its manifest entry, or of MemoryError or DatastoreError. Waiting for it can be interrupted."""
    future: Future[SubIndexEntry] = Future()

    def run() -> None:
        try:
            future.set_result(_sort_folder(folder, direct, memory))
        except BaseException as error:
            future.set_exception(error)

    # Compiled code may take minutes: Ctrl-C and the interpreter's exit do not wait for this thread.
    threading.Thread(target=run, daemon=True, name="freedraft-suffix-sort").start()
    return future


def _sort_folder(folder: Path, direct: int, memory: int) -> SubIndexEntry:
    path = folder / file_name("tokens")
    with reporting("read", path):
        tokens = np.fromfile(path, "<i4")
    n, largest = len(tokens) - PAD, int(tokens.max())
    arrays = sort(tokens, direct, memory)
    del tokens
    m = len(arrays["suffix_array"])
    files = {role: write_array(folder / file_name(role), array) for role, array in arrays.items()}
    return SubIndexEntry(
        name=folder.name, n_tokens=m, n_documents=n - m, max_token=largest, files={"tokens": record(path), **files}
    )


def parse_size(text: str) -> int:
    """Return the bytes in "2GiB", "500 MB" or "1073741824"; `DatastoreError` if it is not a size."""
    try:
        return int(TypeAdapter(ByteSize).validate_python(text))
    except ValidationError:
        raise DatastoreError(f"{text!r} is not a size for --memory: write for instance 2GiB or 500MB") from None


def format_size(size: int) -> str:
    return ByteSize(size).human_readable(separator=" ")


def resident_bytes(field: str = "VmRSS") -> int:
    """Return the present memory of this process in bytes."""
    match = re.search(rf"^{field}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return 1024 * int(match[1]) if match else 0


def peak_resident_bytes() -> int:
    # Not ru_maxrss: on Linux it includes the peak of the parent process.
    return resident_bytes("VmHWM")


def sub_index_memory(memory: int, workers: int = 1) -> int:
    """Return the bytes for each of `workers` concurrent sorts in a build with `memory` bytes in total, this process's
    present memory included; `DatastoreError` if that is too little."""
    overhead = resident_bytes() + _READING_BYTES
    minimum = overhead + workers * _MIN_SORT_BYTES
    if memory < minimum:
        raise DatastoreError(f"--memory {format_size(memory)} is too little: give at least {format_size(minimum)}")
    return (memory - overhead) // workers
