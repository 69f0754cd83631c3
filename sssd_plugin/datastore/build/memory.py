"""Sizes sub-indices so that a build stays within a memory bound."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

from pydantic import ByteSize

from sssd_plugin.datastore.errors import DatastoreError

DEFAULT_MEMORY = 2 << 30
SORT_BYTES = 9  # least memory per token of sorting a sub-index, by `suffix_sort`: tokens, their order, a sparse index
_MIN_SORT_BYTES = SORT_BYTES << 20
_READING_BYTES = 160 << 20  # tokenising a batch, buffers, and allocator overhead
_PROCESS_BYTES = 192 << 20  # a process that sorts elsewhere


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
