"""`SubIndex`: a suffix array over a run of documents; `Snapshot`: the sub-indices that one draft call sees."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SEPARATOR = -1
"""Stands after every document. Below every token id, so it sorts first; never a candidate, so no draft crosses it."""

PAD = 32
"""Separators after the last document: compiled code may look this far beyond any suffix start, unchecked."""

MAX_DIRECT_BUCKETS = 1 << 20
MAX_TOKENS = (1 << 31) - 1 - PAD


@dataclass(frozen=True, slots=True)
class SubIndex:
    """Documents and the sorted starts of their suffixes (papers/sssd.txt 3.1.2; Manber and Myers, 1990).

    Attributes:
        tokens: int32 [n + PAD], documents with a `SEPARATOR` after each, then `PAD` more separators.
        suffix_array: int32 [m], start of every suffix that does not begin with a separator, in lexicographic order.
        bucket_starts: int32 [D + 1]; `suffix_array[bucket_starts[t]:bucket_starts[t + 1]]` are the suffixes that begin
            with token t < D. Larger ids (D is at most 2^20) are found by binary search.
    """

    tokens: NDArray[np.int32]
    suffix_array: NDArray[np.int32]
    bucket_starts: NDArray[np.int32]

    def __post_init__(self) -> None:
        for name in ("tokens", "suffix_array", "bucket_starts"):
            array = getattr(self, name)
            if array.dtype != np.int32 or array.ndim != 1 or not array.flags.c_contiguous:
                raise ValueError(f"SubIndex.{name} must be a contiguous one-dimensional int32 array")
        if len(self.tokens) < PAD or (self.tokens[-PAD:] != SEPARATOR).any():
            raise ValueError(f"SubIndex.tokens must end in {PAD} separators")
        if len(self.bucket_starts) < 1:
            raise ValueError("SubIndex.bucket_starts must not be empty")

    @property
    def n(self) -> int:
        """Tokens, separators between documents included, padding not."""
        return len(self.tokens) - PAD

    @classmethod
    def build(cls, tokens: NDArray[np.int32], vocab_size: int) -> SubIndex:
        """Sort the suffixes of `tokens` (int32 [n], documents with a `SEPARATOR` after each).

        Raises:
            ValueError: more than 2^31 - 33 tokens, or an id below -1.
        """
        tokens = np.ascontiguousarray(tokens, np.int32)
        if len(tokens) > MAX_TOKENS:
            raise ValueError(f"a sub-index holds at most {MAX_TOKENS} tokens, not {len(tokens)}")
        if len(tokens) and int(tokens.min()) < SEPARATOR:
            raise ValueError("token ids must not be negative")
        padded = np.full(len(tokens) + PAD, SEPARATOR, np.int32)
        padded[: len(tokens)] = tokens
        suffixes = sort_suffixes(tokens)
        return cls(padded, suffixes, bucket_starts(tokens, vocab_size))


def sort_suffixes(tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Suffix array of `tokens` without the suffixes that begin with a separator."""
    from sssd_plugin.datastore import suffix_sort

    return suffix_sort.sort_suffixes(tokens)


def bucket_starts(tokens: NDArray[np.int32], vocab_size: int) -> NDArray[np.int32]:
    """Where the suffixes that begin with each token id start in the suffix array: int32 [min(vocab_size, 2^20) + 1]."""
    direct = min(vocab_size, MAX_DIRECT_BUCKETS)
    counts = np.zeros(direct, np.int64)
    for block in range(0, len(tokens), 1 << 20):  # bincount makes an int64 copy of what it counts
        part = tokens[block : block + (1 << 20)]
        counts += np.bincount(part[(part >= 0) & (part < direct)], minlength=direct)
    starts = np.zeros(direct + 1, np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


TABLE_COLUMNS = 7
"""Addresses of tokens, suffix_array and bucket_starts; n, m and D of `SubIndex`; address of its fences."""

FENCE = 16
"""Suffixes between fences: one cache line of the suffix array."""


def fences(sub: SubIndex) -> NDArray[np.int32]:
    """Second token of every `FENCE`-th suffix: int32 [ceil(m / FENCE)].

    A quarter of a byte per token, in memory only. Splitting the bucket of a common token takes most of its steps here
    instead of in suffixes and tokens all over memory.
    """
    return sub.tokens[sub.suffix_array[::FENCE] + 1]


class Snapshot:
    """An immutable set of sub-indices, as one step sees them.

    Attributes:
        sub_indices: what was given, in order.
        table: int64 [K, TABLE_COLUMNS], addresses and sizes for compiled code. Valid while the snapshot lives.
    """

    __slots__ = ("_fences", "sub_indices", "table")

    def __init__(self, sub_indices: Iterable[SubIndex]) -> None:
        self.sub_indices = tuple(sub_indices)
        self.table = np.zeros((len(self.sub_indices), TABLE_COLUMNS), np.int64)
        self._fences = tuple(fences(sub) for sub in self.sub_indices)
        for row, sub, fence in zip(self.table, self.sub_indices, self._fences, strict=True):
            row[:] = (
                sub.tokens.ctypes.data,
                sub.suffix_array.ctypes.data,
                sub.bucket_starts.ctypes.data,
                sub.n,
                len(sub.suffix_array),
                len(sub.bucket_starts) - 1,
                fence.ctypes.data,
            )

    @classmethod
    def of(cls, sub_indices: Iterable[SubIndex]) -> Snapshot:
        return cls(sub_indices)

    @classmethod
    def empty(cls) -> Snapshot:
        return cls(())

    @property
    def n_tokens(self) -> int:
        return sum(sub.n for sub in self.sub_indices)
