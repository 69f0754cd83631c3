"""`SubIndex`: a suffix array over a run of documents."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sssd_plugin.datastore.index.suffix_sort import PAD, PADDING, SEPARATOR, sorted_arrays

MAX_DIRECT_BUCKETS = 1 << 20

TABLE_COLUMNS = 7
"""Columns of `View.table`: addresses of tokens, suffix_array and bucket_starts; n, m and D of `SubIndex`; address
of sparse_index."""


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
        object.__setattr__(self, "row", np.array([*addresses[:3], *sizes, addresses[3]], np.int64))

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
