"""How many tokens a sub-index may hold so that building it stays within a memory bound."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

from sssd_plugin.datastore.errors import DatastoreError
from sssd_plugin.datastore.index.suffix_sort import SORT_BYTES

DEFAULT_MEMORY = 2 << 30
MAX_SUB_INDEX_TOKENS = 1 << 29
"""papers/sssd.txt 3.1.3: 512 Mi tokens per sub-index."""
MIN_SUB_INDEX_TOKENS = 64
_MIN_BY_MEMORY = 1 << 20
_READING_BYTES = 160 << 20
"""Tokenising a batch, buffers, and what the allocator keeps."""


def parse_size(text: str) -> int:
    """Return the bytes in "2GiB", "2G", "500 MB" or "1073741824".

    Raises:
        DatastoreError: not a size.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?b)?\s*", text.lower())
    if not match:
        raise DatastoreError(f"{text!r} is not a size for --memory: write for instance 2GiB or 500MB")
    number, prefix, suffix = match.groups()
    return int(float(number) * (1000 if suffix == "b" else 1024) ** " kmgt".index(prefix or " "))


def format_size(size: float) -> str:
    """Write a number of bytes as "1.5 GiB"."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def resident_bytes(field: str = "VmRSS") -> int:
    """Return the memory of this process now; where the system does not say, its peak so far."""
    try:
        match = re.search(rf"^{field}:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    except OSError:
        match = None
    if match:
        return int(match[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_resident_bytes() -> int:
    """Return the largest memory of this process so far."""
    # Not ru_maxrss: on Linux it begins with the peak of the process that started this one.
    return resident_bytes("VmHWM")


def sub_index_limit(memory: int, tokens: int | None = None, *, sorts: int = 1, each: int = 0) -> int:
    """Return how many tokens, separators included, a sub-index may have in a build that may use `memory` bytes in all,
    what this process holds already included.

    Args:
        tokens: the limit whatever the memory.
        sorts: that go on at the same time, all within `memory`; 0: each has as much of its own, elsewhere.
        each: bytes that every one of them takes besides.

    Raises:
        DatastoreError: less memory than a build needs, or `tokens` out of range.
    """
    if tokens is not None and not MIN_SUB_INDEX_TOKENS <= tokens <= MAX_SUB_INDEX_TOKENS:
        raise DatastoreError(
            f"--sub-index-tokens must be from {MIN_SUB_INDEX_TOKENS} to {MAX_SUB_INDEX_TOKENS}, not {tokens}"
        )
    parts = max(1, sorts)
    overhead = (resident_bytes() + _READING_BYTES if sorts else 0) + parts * each
    minimum = overhead + parts * _MIN_BY_MEMORY * SORT_BYTES
    if memory < minimum:
        raise DatastoreError(f"--memory {format_size(memory)} is too little: give at least {format_size(minimum)}")
    return min((memory - overhead) // parts // SORT_BYTES, tokens or MAX_SUB_INDEX_TOKENS)
