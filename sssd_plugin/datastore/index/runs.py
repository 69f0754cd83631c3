"""`Run`: an immutable sub-index over finished documents in memory, sorted and merged by compiled code without the GIL;
`View`: the sub-indices that the requests of a batch draft from.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from freedraft.compiled import compiled
from sssd_plugin.datastore.index.sub_index import (
    PAD,
    PADDING,
    SEPARATOR,
    SOURCE,
    TABLE_COLUMNS,
    Snapshot,
    SubIndex,
    direct_buckets,
    merge_into,
    sorted_arrays,
    with_tables,
)
from sssd_plugin.sources import LEARNT, RUNNING

_LIBC = ctypes.CDLL(None, use_errno=True)
_LARGE = 1 << 18  # bytes
_BUCKETS_FROM = 4  # direct buckets cost 4 bytes per id: only for runs with at least a quarter as many tokens


@compiled(nogil=True)
def _direct_of(n, direct):
    return direct if _BUCKETS_FROM * n >= direct else 0


# Each of these builds the arrays of a run in one call, so that a thread takes the GIL once and not per array.


@compiled(nogil=True)
def _merged(older, older_order, newer, newer_order, direct):
    old = len(older) - PAD
    tokens = np.empty(old + len(newer), np.int32)
    for i in range(old):
        tokens[i] = older[i]
    for i in range(len(newer)):
        tokens[old + i] = newer[i]
    order = np.empty(len(older_order) + len(newer_order), np.int32)
    merge_into(tokens, older_order, newer_order, old, order)
    return with_tables(tokens, order, _direct_of(old + len(newer) - PAD, direct))


@compiled(nogil=True)
def _without(tokens, order, keep, direct):
    n = len(tokens) - PAD
    place = np.full(n, -1, np.int32)
    end, document = 0, 0
    for i in range(n):
        if keep[document]:
            place[i] = end
            end += 1
        document += tokens[i] < 0
    left = np.full(end + PAD, SEPARATOR, np.int32)
    for i in range(n):
        if place[i] >= 0:
            left[place[i]] = tokens[i]
    left_order = np.empty(end, np.int32)
    m = 0
    for p in order:
        if place[p] >= 0:
            left_order[m] = place[p]
            m += 1
    return with_tables(left, left_order[:m].copy(), _direct_of(end, direct))


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """Documents, in the order in which they were learnt. The arrays must not outlive the run.

    Attributes:
        sub: their sub-index.
        documents: int64 [d, 3], per document: time learnt, ms since 1970; number of its tenant; its own number,
            ascending.
    """

    sub: SubIndex
    documents: NDArray[np.int64]

    @property
    def n(self) -> int:  # tokens, separators included
        return self.sub.n

    @property
    def starts(self) -> NDArray[np.int64]:  # of its documents, in the tokens
        return np.append(0, np.flatnonzero(self.sub.tokens[: self.n] == SEPARATOR)[:-1] + 1)

    def __del__(self) -> None:
        """Return the pages of large arrays without the GIL, which freeing them would hold for milliseconds."""
        for array in (self.sub.tokens, self.sub.suffix_array):
            start = -(-array.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
            size = (array.ctypes.data + array.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE - start
            if size >= _LARGE:
                _LIBC.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_DONTNEED)


def sorted_run(documents: Sequence[NDArray[np.int32]], vocab_size: int, about: NDArray[np.int64]) -> Run:
    """Return a run of documents (int32, without separators); about: `Run.documents`."""
    parts = [part for document in documents for part in (document, [SEPARATOR])]
    tokens = np.concatenate([*parts, PADDING], dtype=np.int32)
    return Run(SubIndex(*sorted_arrays(tokens, _direct_of(len(tokens) - PAD, direct_buckets(vocab_size)))), about)


def merged(older: Run | None, newer: Run, vocab_size: int) -> Run:
    """Merge two runs in one pass; older: None for no run."""
    if older is None:
        return newer
    arrays = _merged(
        older.sub.tokens, older.sub.suffix_array, newer.sub.tokens, newer.sub.suffix_array, direct_buckets(vocab_size)
    )
    return Run(SubIndex(*arrays), np.concatenate([older.documents, newer.documents]))


def without(run: Run, vocab_size: int, keep: NDArray[np.bool_]) -> Run | None:
    """Drop documents that are not in `keep` (bool [d]); None if none is left."""
    arrays = _without(run.sub.tokens, run.sub.suffix_array, keep, direct_buckets(vocab_size))
    return Run(SubIndex(*arrays), run.documents[keep]) if keep.any() else None


def warm_up() -> None:
    """Compile, or load from the cache, the functions of inserting, merging and erasing."""
    run = sorted_run([np.zeros(4, np.int32)], 8, np.zeros((1, 3), np.int64))
    without(merged(run, run, 8), 8, np.arange(2) > 0)


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """The sub-indices that each group of requests sees.

    Attributes:
        table: int64 [R, TABLE_COLUMNS], `SubIndex.row` of each, group after group.
        bounds: int64 [G + 1], where each group's rows start.
        keeps: references that keep the addresses valid.
        widest: the largest number of sub-indices of a group.
    """

    table: NDArray[np.int64]
    bounds: NDArray[np.int64]
    keeps: tuple[object, ...]
    widest: int

    @classmethod
    def of(cls, static: Snapshot, runs: Sequence[Run] = (), running: Run | None = None) -> View:
        """Return the view of one group; running: of answers that are still being written."""
        learnt = [*runs, running] if running else [*runs]
        subs = [*static, *(run.sub for run in learnt)]
        table = np.array([sub.row for sub in subs], np.int64).reshape(-1, TABLE_COLUMNS)
        table[len(static) :, SOURCE], table[len(static) + len(runs) :, SOURCE] = LEARNT, RUNNING
        return cls(table, np.array([0, len(subs)], np.int64), (static, *learnt), len(subs))

    @classmethod
    def join(cls, views: Sequence[View]) -> View:
        """Return a view with a group for each of these views of one group."""
        bounds = np.zeros(len(views) + 1, np.int64)
        np.cumsum([len(view.table) for view in views], out=bounds[1:])
        table = np.concatenate([view.table for view in views])
        return cls(table, bounds, tuple(views), max(view.widest for view in views))
