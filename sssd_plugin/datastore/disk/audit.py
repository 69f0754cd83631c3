"""Checks of a store's contents beyond checksums: are the suffix arrays what they should be?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from sssd_plugin.datastore.disk.format import Role, SubIndexEntry, file_name
from sssd_plugin.datastore.disk.store import Datastore
from sssd_plugin.datastore.errors import REBUILD, DatastoreError
from sssd_plugin.datastore.index.sub_index import SEPARATOR, SubIndex
from sssd_plugin.datastore.index.suffix_sort import DEPTH, fill_sparse, fill_starts

_BLOCK = 1 << 20
SAMPLES = 100_000


def audit(store: Datastore, *, full: bool = False) -> None:
    """Check the counts, the tables and the suffix arrays of what was built, in a store that was opened with `verify`.

    Counts and tables are compared with the tokens, all of them. That the suffix array is a permutation of the suffixes
    is checked by sums of its entries and of their squares, and that it is sorted on `SAMPLES` neighbours; with `full`
    both are proved for every entry, in a byte of memory per token.

    Raises:
        DatastoreError: the first thing that is wrong, with its file.
    """
    rng = np.random.default_rng(0)
    built = [entry for entry in store.manifest.sub_indices if not entry.n_sections]
    for entry, sub in zip(built, store.snapshot.sub_indices, strict=True):
        checks = _Audit(store, entry, sub)
        checks.check_tokens()
        n = max(0, len(sub.suffix_array) - 1)
        if full:
            checks.check_permutation()
            for start in range(0, n, _BLOCK):
                checks.check_neighbours(np.arange(start, min(start + _BLOCK, n)))
        else:
            checks.check_sums()
            checks.check_neighbours(np.arange(n) if n <= SAMPLES else np.unique(rng.integers(0, n, SAMPLES)))


class _Audit:
    def __init__(self, store: Datastore, entry: SubIndexEntry, sub: SubIndex) -> None:
        self.folder = store.path / entry.name
        self.entry, self.sub = entry, sub

    def _fail(self, role: Role, what: str) -> DatastoreError:
        return DatastoreError(f"{self.folder / file_name(role)} is wrong: {what}; {REBUILD}")

    def check_tokens(self) -> None:
        """Check counts, largest id and buckets."""
        tokens = self.sub.tokens[: self.sub.n]
        separators, largest = 0, SEPARATOR
        for _, block in _blocks(tokens):
            separators += int(np.count_nonzero(block == SEPARATOR))
            largest = max(largest, int(block.max()))
        if separators != self.entry.n_documents or largest != self.entry.max_token:
            raise self._fail("tokens", "document count or largest id differ from the manifest's")
        if len(tokens) and tokens[-1] != SEPARATOR:
            raise self._fail("tokens", "the last document is not closed")
        starts, sparse = np.zeros_like(self.sub.bucket_starts), np.zeros_like(self.sub.sparse_index)
        fill_starts(self.sub.tokens, starts)
        if not np.array_equal(starts, self.sub.bucket_starts):
            raise self._fail("bucket_starts", "it does not agree with the tokens")
        fill_sparse(self.sub.tokens, self.sub.suffix_array, sparse)
        if not np.array_equal(sparse, self.sub.sparse_index):
            raise self._fail("sparse_index", "it does not agree with the tokens and the suffix array")

    def check_sums(self) -> None:
        sums = np.zeros(2, np.uint64)  # unsigned, so that they wrap around
        for a, block in _blocks(self.sub.tokens[: self.sub.n]):
            sums += _sums(a + np.flatnonzero(block != SEPARATOR))
        for _, block in _blocks(self.sub.suffix_array):
            sums -= _sums(block)
        if sums.any():
            raise self._fail("suffix_array", "it is no permutation of the suffixes")

    def check_permutation(self) -> None:
        """Prove that each suffix stands once."""
        seen = np.zeros(self.sub.n, bool)
        for _, block in _blocks(self.sub.suffix_array):
            seen[block] = True
        for a, block in _blocks(self.sub.tokens[: self.sub.n]):
            if (seen[a : a + len(block)] != (block >= 0)).any():
                raise self._fail("suffix_array", "it is no permutation of the suffixes")

    def check_neighbours(self, where: NDArray[np.int64]) -> None:
        """Compare these suffixes with their successors, token by token, as far as they are sorted."""
        tokens = self.sub.tokens
        left = self.sub.suffix_array[where].astype(np.int64)
        right = self.sub.suffix_array[where + 1].astype(np.int64)
        for _ in range(DEPTH):
            x, y = tokens[left], tokens[right]
            if (x > y).any():
                raise self._fail("suffix_array", f"not sorted at entry {int(where[np.argmax(x > y)])}")
            # Equal up to a separator: which comes first does not matter, drafts end there.
            go_on = (x == y) & (x != SEPARATOR)
            left, right, where = left[go_on] + 1, right[go_on] + 1, where[go_on]


def _blocks(array: NDArray[np.int32]) -> Iterator[tuple[int, NDArray[np.int32]]]:
    """Yield parts of a mapped array, which may be larger than the memory, after where they start."""
    for start in range(0, len(array), _BLOCK):
        yield start, array[start : start + _BLOCK]


def _sums(positions: NDArray[np.integer]) -> NDArray[np.uint64]:
    wide = positions.astype(np.uint64)
    return np.array([wide.sum(), (wide * wide).sum()], np.uint64)
