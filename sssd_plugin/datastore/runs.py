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
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from sssd_plugin.datastore.sub_index import FENCE, MAX_DIRECT_BUCKETS, PAD, SEPARATOR, TABLE_COLUMNS, SubIndex

DEPTH = 32
_SMALL = 12
_STACK = 256
_LARGE = 1 << 18  # bytes
_BUCKETS_FROM = 4  # direct buckets cost 4 bytes an id, so only runs of at least a quarter as many tokens have them


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
def _join(a, begin, end, b, length, out):
    """out = a[begin:end], b[:length], then separators."""
    n = 0
    for i in range(begin, end):
        out[n] = a[i]
        n += 1
    for i in range(length):
        out[n] = b[i]
        n += 1
    for i in range(n, len(out)):
        out[i] = SEPARATOR


@njit(nogil=True, cache=True)
def _fences(tokens, order, out):
    for i in range(len(out)):
        out[i] = tokens[order[i * FENCE] + 1]


@njit(nogil=True, cache=True)
def _bucket_starts(tokens, n, starts):
    starts[:] = 0
    direct = len(starts) - 1
    for i in range(n):
        if 0 <= tokens[i] < direct:
            starts[tokens[i] + 1] += 1
    for i in range(direct):
        starts[i + 1] += starts[i]


@njit(nogil=True, cache=True)
def _next_document(tokens, at, n):
    """Start of the first document at or after `at`; n if there is none."""
    at = min(at, n)
    while 0 < at < n and tokens[at - 1] >= 0:
        at += 1
    return at


@njit(nogil=True, cache=True)
def _tables(tokens, order, direct):
    """(bucket_starts, fences) of a run."""
    n = len(tokens) - PAD
    starts = np.empty(direct + 1 if _BUCKETS_FROM * n >= direct else 1, np.int32)
    _bucket_starts(tokens, n, starts)
    fences = np.empty((len(order) + FENCE - 1) // FENCE, np.int32)
    _fences(tokens, order, fences)
    return starts, fences


# Each of these makes a run in one call, so that a thread asks for the GIL once and not for every array.


@njit(nogil=True, cache=True)
def _sorted(tokens, direct):
    order = np.empty(len(tokens) - PAD, np.int32)
    n = sort_into(tokens, 0, len(order), order)
    order = order[:n].copy()
    starts, fences = _tables(tokens, order, direct)
    return tokens, order, starts, fences


@njit(nogil=True, cache=True)
def _with_document(old_tokens, old, old_order, document, direct):
    tokens = np.empty(old + len(document) + 1 + PAD, np.int32)
    _join(old_tokens, 0, old, document, len(document), tokens)
    new = np.empty(len(document), np.int32)
    count = sort_into(tokens, old, old + len(document), new)
    order = np.empty(len(old_order) + count, np.int32)
    merge_into(tokens, old_order, 0, new[:count], 0, order)
    starts, fences = _tables(tokens, order, direct)
    return tokens, order, starts, fences


@njit(nogil=True, cache=True)
def _merged(older, n, older_order, start, newer, added, newer_order, direct):
    tokens = np.empty(n - start + added + PAD, np.int32)
    _join(older, start, n, newer, added, tokens)
    order = np.empty(len(older_order) + len(newer_order), np.int32)
    count = merge_into(tokens, older_order, start, newer_order, n - start, order)
    if start > 0:
        order = order[:count].copy()
    starts, fences = _tables(tokens, order, direct)
    return tokens, order, starts, fences


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Documents that follow each other in time.

    Attributes:
        sub: their sub-index.
        first, last: numbers of the oldest and the newest document.
        row: int64 [1, TABLE_COLUMNS], of a `Snapshot.table`; valid while the run lives.
    """

    sub: SubIndex
    fences: NDArray[np.int32]
    first: int
    last: int
    row: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        sub = self.sub
        row = np.array(
            [
                [
                    sub.tokens.ctypes.data, sub.suffix_array.ctypes.data, sub.bucket_starts.ctypes.data,
                    sub.n, len(sub.suffix_array), len(sub.bucket_starts) - 1, self.fences.ctypes.data,
                ]
            ],
            np.int64,
        )  # fmt: skip
        assert row.shape == (1, TABLE_COLUMNS)
        object.__setattr__(self, "row", row)

    @property
    def n(self) -> int:
        """Tokens, separators included."""
        return self.sub.n

    @property
    def nbytes(self) -> int:
        sub = self.sub
        return sub.tokens.nbytes + sub.suffix_array.nbytes + sub.bucket_starts.nbytes + self.fences.nbytes


def sorted_run(documents: Sequence[NDArray[np.int32]], vocab_size: int, first: int) -> Run:
    """A run of documents (int32, without separators), numbered from `first`."""
    tokens = np.full(sum(map(len, documents)) + len(documents) + PAD, SEPARATOR, np.int32)
    at = 0
    for document in documents:
        tokens[at : at + len(document)] = document
        at += len(document) + 1
    return _run(_sorted(tokens, _direct(vocab_size)), first, first + len(documents) - 1)


def with_document(run: Run | None, document: NDArray[np.int32], vocab_size: int, number: int) -> Run:
    """The run with one more document, which `number` numbers. Costs a pass over the run."""
    if run is None:
        return sorted_run([document], vocab_size, number)
    document = np.ascontiguousarray(document, np.int32)
    made = _with_document(run.sub.tokens, run.n, run.sub.suffix_array, document, _direct(vocab_size))
    return _run(made, run.first, number)


def merged(older: Run, newer: Run | None, vocab_size: int, cut: int = 0) -> Run | None:
    """Two runs as one, without the documents that start in the first `cut` tokens; None if nothing is left."""
    start = int(_next_document(older.sub.tokens, cut, older.n)) if cut else 0
    added = newer.n if newer else 0
    if older.n - start + added == 0:
        return None
    more = newer.sub if newer else older.sub
    made = _merged(
        older.sub.tokens, older.n, older.sub.suffix_array, start,
        more.tokens, added, more.suffix_array if newer else more.suffix_array[:0], _direct(vocab_size),
    )  # fmt: skip
    first = older.first + (older.last - older.first) * start // max(1, older.n)
    return _run(made, first, newer.last if newer else older.last)


def let_go(runs: list[Run]) -> list[Run]:
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


_ALONE = _holds([object()])[0]
_PAGE = mmap.PAGESIZE
_LIBC = ctypes.CDLL(None, use_errno=True)


def _hand_back(array: NDArray[np.int32]) -> None:
    """Let the system have the memory of an array that nobody reads any more."""
    start = -(-array.ctypes.data // _PAGE) * _PAGE
    size = (array.ctypes.data + array.nbytes) // _PAGE * _PAGE - start
    if size >= _LARGE and sys.platform == "linux":
        _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def _direct(vocab_size: int) -> int:
    return min(vocab_size, MAX_DIRECT_BUCKETS)


def _run(made: tuple[NDArray[np.int32], ...], first: int, last: int) -> Run:
    tokens, order, starts, fences = made
    return Run(SubIndex(tokens, order, starts), fences, first, last)
