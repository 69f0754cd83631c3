"""`Run`: an immutable sub-index over finished documents in memory, sorted and merged by compiled code without the GIL.

Suffixes are compared up to the end of their document and over at most `DEPTH` tokens, more than any look-up reads, so
text that repeats for ever costs no more than other text. A suffix array that is sorted in full is sorted in this order
too.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from sssd_plugin.datastore.index.sub_index import PAD, SEPARATOR, SPARSE_STEP, SubIndex, direct_buckets

DEPTH = 32
_SMALL = 12
_STACK = 256
_LARGE = 1 << 18  # bytes
_BUCKETS_FROM = 4  # direct buckets cost 4 bytes an id, so only runs of at least a quarter as many tokens have them


class RunArrays(NamedTuple):
    """The arrays of a run, as compiled code takes and returns them; see `SubIndex`."""

    tokens: NDArray[np.int32]
    suffix_array: NDArray[np.int32]
    bucket_starts: NDArray[np.int32]
    sparse_index: NDArray[np.int32]

    @classmethod
    def of(cls, sub: SubIndex) -> RunArrays:
        return cls(sub.tokens, sub.suffix_array, sub.bucket_starts, sub.sparse_index)


@njit(nogil=True, cache=True)
def _before(tokens, p, q, depth):
    """Whether suffix p comes before suffix q; both share their first `depth` tokens."""
    for d in range(depth, DEPTH):
        x, y = tokens[p + d], tokens[q + d]
        if x != y:
            return x < y
        if x < 0:
            return False
    return False


@njit(nogil=True, cache=True)
def sort_into(tokens, begin, end, order):
    """Sort the suffixes of tokens[begin:end] that do not start with a separator into `order`; their number.

    Three-way radix quicksort (Bentley and Sedgewick, 1997) over tokens.

    Args:
        tokens: int32, a separator after each document and PAD more at the end.
        order: int32 [>= end - begin], out.
    """
    n = 0
    for i in range(begin, end):
        if tokens[i] >= 0:
            order[n] = i
            n += 1
    los = np.empty(_STACK, np.int64)
    his = np.empty(_STACK, np.int64)
    depths = np.empty(_STACK, np.int64)
    parts = np.empty((3, 3), np.int64)
    los[0], his[0], depths[0] = 0, n, 0
    height = 1
    while height > 0:
        height -= 1
        lo, hi, depth = los[height], his[height], depths[height]
        if hi - lo <= _SMALL:
            for i in range(lo + 1, hi):
                p = order[i]
                j = i
                while j > lo and _before(tokens, p, order[j - 1], depth):
                    order[j] = order[j - 1]
                    j -= 1
                order[j] = p
            continue
        x = tokens[order[lo] + depth]
        y = tokens[order[(lo + hi) >> 1] + depth]
        z = tokens[order[hi - 1] + depth]
        pivot = max(min(x, y), min(max(x, y), z))
        a, i, b = lo, lo, hi
        while i < b:
            p = order[i]
            t = tokens[p + depth]
            if t < pivot:
                order[i] = order[a]
                order[a] = p
                a += 1
                i += 1
            elif t > pivot:
                b -= 1
                order[i] = order[b]
                order[b] = p
            else:
                i += 1
        parts[0, 0], parts[0, 1], parts[0, 2] = lo, a, depth
        parts[1, 0], parts[1, 1], parts[1, 2] = b, hi, depth
        parts[2, 0], parts[2, 1], parts[2, 2] = a, b, depth + 1
        if pivot < 0 or depth + 1 >= DEPTH:  # these are equal
            parts[2, 1] = a
        # The largest part is sorted last, so that few are waiting at any time.
        largest = 0
        for k in range(1, 3):
            if parts[k, 1] - parts[k, 0] > parts[largest, 1] - parts[largest, 0]:
                largest = k
        for k in range(3):
            part = (largest + k) % 3
            if parts[part, 1] - parts[part, 0] > 1:
                los[height], his[height], depths[height] = parts[part, 0], parts[part, 1], parts[part, 2]
                height += 1
    return n


@njit(nogil=True, cache=True)
def merge_into(tokens, first, cut, second, shift, order):
    """Merge two sorted lists of suffixes of `tokens`; on a tie the first list's come first.

    Args:
        tokens: int32, as for `sort_into`.
        first: int32, places plus `cut`; those below `cut` are left out.
        second: int32, places minus `shift`.
        order: int32, out.

    Returns:
        Number of suffixes.
    """
    n, i, j = 0, 0, 0
    while i < len(first) and first[i] < cut:
        i += 1
    while i < len(first) and j < len(second):
        p, q = first[i] - cut, second[j] + shift
        if _before(tokens, q, p, 0):
            order[n] = q
            j += 1
        else:
            order[n] = p
            i += 1
            while i < len(first) and first[i] < cut:
                i += 1
        n += 1
    while i < len(first):
        if first[i] >= cut:
            order[n] = first[i] - cut
            n += 1
        i += 1
    while j < len(second):
        order[n] = second[j] + shift
        j += 1
        n += 1
    return n


@njit(nogil=True, cache=True)
def _with_tables(tokens, order, direct):
    """`RunArrays` of sorted suffixes, with buckets for the ids below `direct`."""
    n = len(tokens) - PAD
    direct = direct if _BUCKETS_FROM * n >= direct else 0
    starts = np.zeros(direct + 1, np.int32)
    for i in range(n):
        if 0 <= tokens[i] < direct:
            starts[tokens[i] + 1] += 1
    for i in range(direct):
        starts[i + 1] += starts[i]
    sparse = np.empty((len(order) + SPARSE_STEP - 1) // SPARSE_STEP, np.int32)
    for i in range(len(sparse)):
        sparse[i] = tokens[order[i * SPARSE_STEP] + 1]
    return RunArrays(tokens, order, starts, sparse)


@njit(nogil=True, cache=True)
def _next_document(tokens, at, n):
    """Start of the first document at or after `at`; n if there is none."""
    at = min(at, n)
    while 0 < at < n and tokens[at - 1] >= 0:
        at += 1
    return at


# Each of these makes a run in one call, so that a thread asks for the GIL once and not for every array.


@njit(nogil=True, cache=True)
def _sorted(tokens, direct):
    order = np.empty(len(tokens) - PAD, np.int32)
    n = sort_into(tokens, 0, len(order), order)
    return _with_tables(tokens, order[:n].copy(), direct)


@njit(nogil=True, cache=True)
def _with_document(run, document, direct):
    old, end = len(run.tokens) - PAD, len(run.tokens) - PAD + len(document)
    tokens = np.full(end + 1 + PAD, SEPARATOR, np.int32)
    tokens[:old] = run.tokens[:old]
    tokens[old:end] = document
    new = np.empty(len(document), np.int32)
    count = sort_into(tokens, old, end, new)
    order = np.empty(len(run.suffix_array) + count, np.int32)
    merge_into(tokens, run.suffix_array, 0, new[:count], 0, order)
    return _with_tables(tokens, order, direct)


@njit(nogil=True, cache=True)
def _merged(older, start, newer, direct):
    """Both runs as one, without what is before `start` in the older one."""
    kept = len(older.tokens) - PAD - start
    tokens = np.empty(kept + len(newer.tokens), np.int32)
    tokens[:kept] = older.tokens[start : start + kept]
    tokens[kept:] = newer.tokens
    order = np.empty(len(older.suffix_array) + len(newer.suffix_array), np.int32)
    count = merge_into(tokens, older.suffix_array, start, newer.suffix_array, kept, order)
    if start > 0:
        order = order[:count].copy()
    return _with_tables(tokens, order, direct)


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Documents that follow each other in time.

    Attributes:
        sub: their sub-index.
        first, last: numbers of the oldest and the newest document.
    """

    sub: SubIndex
    first: int
    last: int

    @property
    def n(self) -> int:
        """Tokens, separators included."""
        return self.sub.n


def sorted_run(documents: Sequence[NDArray[np.int32]], vocab_size: int, first: int) -> Run:
    """A run of documents (int32, without separators), numbered from `first`."""
    end = np.array([SEPARATOR], np.int32)
    parts = [part for document in documents for part in (document, end)]
    tokens = np.concatenate([*parts, np.full(PAD, SEPARATOR, np.int32)], dtype=np.int32)
    return Run(SubIndex(*_sorted(tokens, direct_buckets(vocab_size))), first, first + len(documents) - 1)


def with_document(run: Run | None, document: NDArray[np.int32], vocab_size: int, number: int) -> Run:
    """The run with one more document, which `number` numbers. Costs a pass over the run."""
    if run is None:
        return sorted_run([document], vocab_size, number)
    document = np.ascontiguousarray(document, np.int32)
    arrays = _with_document(RunArrays.of(run.sub), document, direct_buckets(vocab_size))
    return Run(SubIndex(*arrays), run.first, number)


def merged(older: Run, newer: Run | None, vocab_size: int, cut: int = 0) -> Run | None:
    """Two runs as one, without the documents that start in the first `cut` tokens; None if nothing is left."""
    start = int(_next_document(older.sub.tokens, cut, older.n)) if cut else 0
    if older.n - start + (newer.n if newer else 0) == 0:
        return None
    more = RunArrays.of(newer.sub) if newer else _NO_DOCUMENTS
    arrays = _merged(RunArrays.of(older.sub), start, more, direct_buckets(vocab_size))
    first = older.first + (older.last - older.first) * start // max(1, older.n)
    return Run(SubIndex(*arrays), first, newer.last if newer else older.last)


def warm_up() -> None:
    """Compile, or load from the cache, what inserting and merging call."""
    document = np.zeros(4, np.int32)
    run = with_document(with_document(None, document, 8, 0), document, 8, 1)
    merged(run, run, 8)
    merged(run, None, 8, 1)


def release(runs: list[Run]) -> list[Run]:
    """Free those of `runs` that nobody else holds; the others. The list must be the caller's only hold on them.

    Unmapping a large array takes milliseconds, in which whoever drops it last would have the GIL: the pages are handed
    back before, without it.
    """
    alone = [count == _ALONE for count in _holds(runs)]
    for run in [run for run, free in zip(runs, alone, strict=True) if free]:
        for array in (run.sub.tokens, run.sub.suffix_array):
            _hand_back(array)
    return [run for run, free in zip(runs, alone, strict=True) if not free]


def _holds(things: list[Any]) -> list[int]:
    return [sys.getrefcount(thing) for thing in things]


_NO_DOCUMENTS = RunArrays(np.full(PAD, SEPARATOR, np.int32), *(np.zeros(0, np.int32) for _ in range(3)))
_ALONE = _holds([object()])[0]
_PAGE = mmap.PAGESIZE
_LIBC = ctypes.CDLL(None, use_errno=True)


def _hand_back(array: NDArray[np.int32]) -> None:
    """Let the system have the memory of an array that nobody reads any more."""
    start = -(-array.ctypes.data // _PAGE) * _PAGE
    size = (array.ctypes.data + array.nbytes) // _PAGE * _PAGE - start
    if size >= _LARGE and sys.platform == "linux":
        _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)
