"""`SubIndex`: a suffix array over a run of documents; sorting and merging suffixes, in compiled code without the GIL.

Suffixes are compared up to the end of their document and over at most `DEPTH` tokens, as far as look-ups read (a match
and a draft of at most 64 tokens each), so repetitive text costs little more.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from freedraft.compiled import compiled
from sssd_plugin.sources import DATASTORE

SEPARATOR = -1  # after every document; below every token id, so it sorts first, and no draft crosses it
PAD = 32  # separators after the last document: compiled code may look this far beyond any suffix start, unchecked
PADDING = np.full(PAD, SEPARATOR, np.int32)
SPARSE_STEP = 16  # suffixes per entry of the sparse index: one cache line of the suffix array
DEPTH = 128
_SMALL = 12
_STACK = 256
MAX_DIRECT_BUCKETS = 1 << 20

TABLE_COLUMNS = 8
"""Columns of `View.table`: addresses of tokens, suffix_array and bucket_starts; n, m and D of `SubIndex`; address
of sparse_index; what the text is, of `SOURCES`."""
SOURCE = 7


@dataclass(frozen=True, slots=True, eq=False)
class SubIndex:
    """Documents and the sorted starts of their suffixes (arXiv 2411.05894, 3.1.2; Manber and Myers, 1990).

    Attributes:
        tokens: int32 [n + PAD], documents with a `SEPARATOR` after each, then `PAD` more separators.
        suffix_array: int32 [m], start of every suffix that does not begin with a separator, in lexicographic order.
        bucket_starts: int32 [D + 1]; `suffix_array[bucket_starts[t]:bucket_starts[t + 1]]` are the suffixes that begin
            with token t < D. Larger ids (D is at most 2^20) are found by binary search.
        sparse_index: int32 [ceil(m / SPARSE_STEP)], second token of every `SPARSE_STEP`-th suffix. Narrowing the
            bucket of a common token reads mostly this array, which saves cache misses.
        row: int64 [TABLE_COLUMNS], of a `View.table`; valid while the sub-index lives.
    """

    tokens: NDArray[np.int32]
    suffix_array: NDArray[np.int32]
    bucket_starts: NDArray[np.int32]
    sparse_index: NDArray[np.int32]
    row: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        if len(self.tokens) < PAD or (self.tokens[-PAD:] != SEPARATOR).any():
            raise ValueError(f"SubIndex.tokens must end in {PAD} separators")
        addresses = [a.ctypes.data for a in (self.tokens, self.suffix_array, self.bucket_starts, self.sparse_index)]
        sizes = (self.n, len(self.suffix_array), len(self.bucket_starts) - 1)
        object.__setattr__(self, "row", np.array([*addresses[:3], *sizes, addresses[3], DATASTORE], np.int64))

    @property
    def n(self) -> int:  # tokens, separators between documents included, padding not
        return len(self.tokens) - PAD

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.suffix_array.nbytes + self.bucket_starts.nbytes + self.sparse_index.nbytes

    @classmethod
    def build(cls, tokens: NDArray[np.int32], vocab_size: int) -> SubIndex:
        """Sort the suffixes of `tokens` (int32 [n < 2^31 - PAD], documents with a `SEPARATOR` after each)."""
        return cls(*sorted_arrays(np.concatenate([tokens, PADDING], dtype=np.int32), direct_buckets(vocab_size)))


Snapshot = tuple[SubIndex, ...]
"""The sub-indices of a built store, and of corpora."""


def direct_buckets(vocab_size: int) -> int:  # ids that have a bucket of their own
    return min(vocab_size, MAX_DIRECT_BUCKETS)


@compiled(nogil=True)
def before(tokens, p, q, depth):
    """Return whether suffix p comes before suffix q; both share their first `depth` tokens."""
    for d in range(depth, DEPTH):
        x, y = tokens[p + d], tokens[q + d]
        if x != y:
            return x < y
        if x < 0:
            return False
    return False


@compiled(nogil=True)
def sort_into(tokens, order):
    """Sort the suffixes of tokens (int32 [n + PAD]) that do not start with a separator into `order`, by three-way radix
    quicksort (Bentley and Sedgewick, 1997); return their number."""
    n = 0
    for i in range(len(tokens) - PAD):
        if tokens[i] >= 0:
            order[n] = i
            n += 1
    stack = np.empty((_STACK, 3), np.int64)
    stack[0, 0], stack[0, 1], stack[0, 2] = 0, n, 0
    height = 1
    while height > 0:
        height -= 1
        lo, hi, depth = stack[height, 0], stack[height, 1], stack[height, 2]
        if hi - lo <= _SMALL:
            for i in range(lo + 1, hi):
                p, j = order[i], i
                while j > lo and before(tokens, p, order[j - 1], depth):
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
                order[i], order[a] = order[a], p
                a += 1
                i += 1
            elif t > pivot:
                b -= 1
                order[i], order[b] = order[b], p
            else:
                i += 1
        # Suffixes of the middle part at this depth are equal.
        sorted_to = b if pivot < 0 or depth + 1 >= DEPTH else a
        parts = ((lo, a, depth), (b, hi, depth), (sorted_to, b, depth + 1))
        # The largest part is sorted last, to keep the stack small.
        largest = 0
        for k in range(1, 3):
            if parts[k][1] - parts[k][0] > parts[largest][1] - parts[largest][0]:
                largest = k
        for k in range(3):
            part = parts[(largest + k) % 3]
            if part[1] - part[0] > 1:
                stack[height, 0], stack[height, 1], stack[height, 2] = part
                height += 1
    return n


@compiled(nogil=True)
def merge_into(tokens, first, second, shift, order):
    """Merge two sorted lists of suffixes of `tokens` (int32) into `order`: those at `first`, and those at `second` plus
    `shift`; on a tie the first list's come first."""
    n, j = 0, 0
    for p in first:
        while j < len(second) and before(tokens, second[j] + shift, p, 0):
            order[n] = second[j] + shift
            j += 1
            n += 1
        order[n] = p
        n += 1
    for q in second[j:]:
        order[n] = q + shift
        n += 1


@compiled(nogil=True)
def fill_starts(tokens, starts):
    """Fill `SubIndex.bucket_starts` (int32 [D + 1], zeros) of tokens (int32 [n + PAD])."""
    direct = len(starts) - 1
    for i in range(len(tokens) - PAD):
        if 0 <= tokens[i] < direct:
            starts[tokens[i] + 1] += 1
    for i in range(direct):
        starts[i + 1] += starts[i]


@compiled(nogil=True)
def with_tables(tokens, order, direct):
    """Return the arrays of a `SubIndex` of sorted suffixes, with buckets for the ids below `direct`."""
    starts = np.zeros(direct + 1, np.int32)
    fill_starts(tokens, starts)
    return tokens, order, starts, tokens[order[::SPARSE_STEP] + 1]


@compiled(nogil=True)
def sorted_arrays(tokens, direct):
    """Sort the suffixes of tokens (int32 [n + PAD]) and return the arrays of their `SubIndex`."""
    order = np.empty(len(tokens) - PAD, np.int32)
    return with_tables(tokens, order[: sort_into(tokens, order)], direct)
