"""`Sorter`: where the suffixes of a sub-index are sorted: in this process, in several others, or on a Ray cluster."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import threading
from concurrent.futures import Future
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import numpy as np

from sssd_plugin.datastore.disk.checksum import FileEntry, write_array
from sssd_plugin.datastore.disk.format import file_name
from sssd_plugin.datastore.errors import DatastoreError
from sssd_plugin.datastore.index.suffix_sort import sort_bytes, to_bytes

_OUT_OF_MEMORY = "not enough memory to sort a sub-index: give a smaller --memory"


class Sorter:
    """Sorts in this process, one sub-index after the other.

    Attributes:
        beside: sub-indices that are sorted while more is read.
        in_memory: sub-indices whose sorting has to fit into the build's memory at the same time; 0: none of them, each
            has as much of its own.
        process_bytes: memory that sorting one takes besides.
    """

    beside = 0
    in_memory = 1
    process_bytes = 0

    def sort(self, folder: Path, length: int, n_documents: int) -> Future[FileEntry]:
        """Write the suffix array of the sub-index in `folder`, whose `length` tokens (with separators) are there.

        Returns:
            What to record of the file. Waiting for it can be interrupted; it raises what `write_order` does.
        """
        future: Future[FileEntry] = Future()

        def run() -> None:
            try:
                future.set_result(self._sort(folder, length, n_documents))
            except BaseException as error:
                future.set_exception(error)

        # Compiled code that may take minutes: neither Ctrl-C nor the interpreter's end waits for this thread.
        threading.Thread(target=run, daemon=True, name="freedraft-suffix-sort").start()
        return future

    def close(self) -> None:
        """Give up what is not done."""

    def _sort(self, folder: Path, length: int, n_documents: int) -> FileEntry:
        return write_order(folder, length, n_documents)


class ProcessSorter(Sorter):
    """Sorts in processes of their own, one for each sub-index, `workers` at a time."""

    process_bytes = 96 << 20

    def __init__(self, workers: int) -> None:
        self.beside = self.in_memory = workers
        self._context = multiprocessing.get_context("spawn")
        self._processes: set[BaseProcess] = set()
        self._lock = threading.Lock()
        self._closed = False

    def close(self) -> None:
        with self._lock:
            self._closed = True
            processes = list(self._processes)
        for process in processes:
            process.kill()
            process.join()

    def _sort(self, folder: Path, length: int, n_documents: int) -> FileEntry:
        answer, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_answer, args=(theirs, folder, length, n_documents), daemon=True)
        with self._lock:
            if self._closed:
                raise DatastoreError("the build was given up")
            process.start()
            self._processes.add(process)
        theirs.close()
        try:
            entry, error = answer.recv()
        except EOFError:
            raise DatastoreError(f"a worker was killed while it sorted {folder.name}: {_OUT_OF_MEMORY}") from None
        finally:
            process.join()
            with self._lock:
                self._processes.discard(process)
        if error is not None:
            raise DatastoreError(error)
        return entry


def write_order(folder: Path, length: int, n_documents: int) -> FileEntry:
    """Sort the sub-index in `folder` and write its suffix array.

    Raises:
        DatastoreError: too little memory, or a disk that refuses.
    """
    try:
        tokens = np.memmap(folder / file_name("tokens"), "<i4", "r", shape=(length,))
        text = to_bytes(tokens)
        del tokens  # unmapped, so that its pages do not count while sorting
        return write_array(folder / file_name("suffix_array"), sort_bytes(text)[n_documents:])
    except MemoryError:
        raise DatastoreError(_OUT_OF_MEMORY) from None


def _answer(pipe: Connection, folder: Path, length: int, n_documents: int) -> None:
    """Sort in a worker process and send what is recorded of the file, or an error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the build, which ends its workers
    try:
        answer: tuple[FileEntry | None, str | None] = write_order(folder, length, n_documents), None
    except DatastoreError as error:
        answer = None, str(error)
    except Exception as error:
        answer = None, f"a worker failed to sort {folder.name}: {error!r}"
    with contextlib.suppress(OSError):  # the build is gone
        pipe.send(answer)
