"""`Sorter`: sorts the suffixes of sub-indices, in threads of this process or on a Ray cluster; memory of a build."""

from __future__ import annotations

import logging
import os
import re
import resource
import socket
import subprocess
import sys
import threading
import warnings
from concurrent.futures import Future
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray
from pydantic import ByteSize

from sssd_plugin.datastore.disk.checksum import record, write_array
from sssd_plugin.datastore.disk.format import Role, SubIndexEntry, file_name
from sssd_plugin.datastore.errors import DatastoreError, reporting
from sssd_plugin.datastore.index.suffix_sort import PAD, can_sort_bytes, sort_bytes, sorted_arrays, with_tables

DEFAULT_MEMORY = 2 << 30
SORT_BYTES = 9  # least memory per token of sorting a sub-index, by `suffix_sort`: tokens, their order, a sparse index
HEALTH_SECONDS = 15.0
_MIN_SORT_BYTES = SORT_BYTES << 20
_READING_BYTES = 160 << 20  # tokenising a batch, buffers, and allocator overhead
_PROCESS_BYTES = 192 << 20  # a process that sorts elsewhere

Int32 = NDArray[np.int32]
Arrays = dict[Role, Int32]


def sort(tokens: Int32, direct: int, memory: int) -> Arrays:
    """Return the arrays of a `SubIndex` from its tokens (int32 [n + PAD]), with `direct` buckets. Uses libdivsufsort if
    it is installed and `memory` bytes suffice for it, tokens included."""
    n, largest = len(tokens) - PAD, int(tokens.max())
    if can_sort_bytes(n, largest, memory):
        arrays = with_tables(tokens, sort_bytes(tokens, largest), direct)
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


class RaySorter(Sorter):
    """Tokens and results go through Ray's object store: nodes need freedraft, but no shared disk.

    Args:
        address: of the cluster ("host:6379", "ray://host:10001", "auto"), or "local" for one on this machine.
        memory: bytes per task, by which Ray schedules tasks.

    Raises:
        DatastoreError: ray is not installed, or there is no cluster.
    """

    def __init__(self, address: str, memory: int) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError:
            raise DatastoreError("--ray needs ray: in the clone of freedraft, pip install '.[ray]'") from None
        _check_answers(address)
        try:
            with warnings.catch_warnings(action="ignore"):
                ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
                nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        except Exception as error:
            raise DatastoreError(_one_line(f"cannot use the Ray cluster at {address}", error)) from None
        if not any(node.get("CPU", 0) >= 1 and node.get("memory", 0) >= memory for node in nodes):
            ray.shutdown()  # a task too large for every node would wait for ever
            size = format_size(memory)
            raise DatastoreError(f"no node of the Ray cluster at {address} has {size}: give a smaller --memory")
        self.in_memory, self.beside = 0, max(1, int(sum(node.get("CPU", 0) for node in nodes)))
        self._ray, self._task = ray, ray.remote(num_cpus=1, memory=memory, max_retries=2)(sort)

    def close(self) -> None:
        self._ray.shutdown()  # cancels the tasks that still run

    def _sort(self, tokens: Int32, direct: int, memory: int) -> Arrays:
        try:
            return self._task.remote(self._ray.put(tokens), direct, memory).future().result()
        except Exception as error:
            raise DatastoreError(_one_line("a Ray task failed", error)) from None


def _check_answers(address: str) -> None:
    """Refuse an address without Ray: `ray.init` would retry for minutes and fail with many lines."""
    if address in ("auto", "local"):
        return
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        socket.create_connection((parts.hostname or "", parts.port or 0), timeout=5).close()
        if "://" not in address:  # Ray's client has its own timeout
            command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
            subprocess.run(command, capture_output=True, timeout=HEALTH_SECONDS, check=True)
        return
    except subprocess.SubprocessError:
        reason = "what listens there does not answer as one"
    except (OSError, ValueError) as error:
        reason = str(error)
    raise DatastoreError(
        f"cannot reach a Ray cluster at {address}: {reason}; correct --ray (host:6379, ray://host:10001 or auto), "
        f"or build here with --workers"
    )


def _one_line(what: str, error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return f"{what}: {lines[-1][:300]}; see its logs, or build here with --workers"  # earlier lines: a traceback


def parse_size(text: str) -> int:
    """Return the bytes in "2GiB", "2G", "500 MB" or "1073741824"; `DatastoreError` if it is not a size."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?\s*", text.lower())
    if not match:
        raise DatastoreError(f"{text!r} is not a size for --memory: write for instance 2GiB or 500MB")
    number, prefix, suffix = match.groups()
    return int(float(number) * (1000 if suffix == "b" else 1024) ** " kmgt".index(prefix or " "))


def format_size(size: int) -> str:
    return ByteSize(size).human_readable(separator=" ")


def resident_bytes(field: str = "VmRSS") -> int:
    """Return the present memory of this process; its peak so far where the system does not report it."""
    try:
        match = re.search(rf"^{field}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        match = None
    if match:
        return int(match[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_resident_bytes() -> int:
    # Not ru_maxrss: on Linux it includes the peak of the parent process.
    return resident_bytes("VmHWM")


def sub_index_memory(memory: int, sorts: int = 1) -> int:
    """Return the bytes for sorting each sub-index in a build with `memory` bytes in total, this process's present
    memory included; `DatastoreError` if that is too little.

    Args:
        sorts: concurrent sorts within `memory`; 0: each has that memory in another process.
    """
    parts = max(1, sorts)
    overhead = resident_bytes() + _READING_BYTES if sorts else _PROCESS_BYTES
    minimum = overhead + parts * _MIN_SORT_BYTES
    if memory < minimum:
        raise DatastoreError(f"--memory {format_size(memory)} is too little: give at least {format_size(minimum)}")
    return (memory - overhead) // parts
