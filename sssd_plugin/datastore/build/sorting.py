"""`Sorter`: sorts the suffixes of sub-indices, in threads of this process or on a Ray cluster."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sssd_plugin.datastore.disk.checksum import record, write_array
from sssd_plugin.datastore.disk.format import Role, SubIndexEntry, file_name
from sssd_plugin.datastore.errors import DatastoreError, reporting
from sssd_plugin.datastore.index import byte_sort
from sssd_plugin.datastore.index.suffix_sort import PAD, sorted_arrays, with_tables

Int32 = NDArray[np.int32]
Arrays = dict[Role, Int32]


def sort(tokens: Int32, direct: int, memory: int) -> Arrays:
    """Return the arrays of a `SubIndex` from its tokens (int32 [n + PAD]), with `direct` buckets. Uses libdivsufsort if
    it is installed and `memory` bytes suffice for it, tokens included."""
    n, largest = len(tokens) - PAD, int(tokens.max())
    if byte_sort.installed() and byte_sort.can_sort(n, largest) and n * byte_sort.bytes_per_token(largest) <= memory:
        arrays = with_tables(tokens, byte_sort.sorted_suffixes(tokens, largest), direct)
    else:
        arrays = sorted_arrays(tokens, direct)
    return {"suffix_array": arrays[1], "bucket_starts": arrays[2], "sparse_index": arrays[3]}


class Sorter:
    """Sorts in `workers` threads of this process, by compiled code without the GIL.

    Attributes:
        beside: sub-indices sorted while more input is read.
        in_memory: sub-indices sorted at a time within the build's memory; 0: each has that memory elsewhere.
    """

    def __init__(self, workers: int = 1) -> None:
        self.in_memory = workers
        self.beside = workers if workers > 1 else 0

    def sort(self, folder: Path, direct: int, memory: int) -> Future[SubIndexEntry]:
        """Sort the sub-index in `folder` within `memory` bytes and write its arrays. Returns a future of its manifest
        entry, or of DatastoreError: too little memory, or a disk error. Waiting for it can be interrupted."""
        future: Future[SubIndexEntry] = Future()

        def run() -> None:
            try:
                future.set_result(self._write(folder, direct, memory))
            except MemoryError:
                future.set_exception(DatastoreError("not enough memory to sort a sub-index: give a smaller --memory"))
            except BaseException as error:
                future.set_exception(error)

        # Compiled code may take minutes: Ctrl-C and the interpreter's exit do not wait for this thread.
        threading.Thread(target=run, daemon=True, name="freedraft-suffix-sort").start()
        return future

    def close(self) -> None:
        """Cancel pending sorts."""

    def _write(self, folder: Path, direct: int, memory: int) -> SubIndexEntry:
        path = folder / file_name("tokens")
        with reporting("read", path):
            tokens = np.fromfile(path, "<i4")
        n, largest = len(tokens) - PAD, int(tokens.max())
        arrays = self._sort(tokens, direct, memory)
        del tokens
        m = len(arrays["suffix_array"])
        files = {role: write_array(folder / file_name(role), array) for role, array in arrays.items()}
        return SubIndexEntry(
            name=folder.name, n_tokens=m, n_documents=n - m, max_token=largest, files={"tokens": record(path), **files}
        )

    def _sort(self, tokens: Int32, direct: int, memory: int) -> Arrays:
        return sort(tokens, direct, memory)
