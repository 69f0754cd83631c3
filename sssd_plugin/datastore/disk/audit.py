"""Checks of a store's contents beyond checksums: are the suffix arrays what they should be?"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from freedraft.compiled import compiled
from sssd_plugin.datastore.disk.format import Role, file_name
from sssd_plugin.datastore.disk.store import Datastore
from sssd_plugin.datastore.errors import REBUILD, DatastoreError
from sssd_plugin.datastore.index.sub_index import SEPARATOR
from sssd_plugin.datastore.index.suffix_sort import before, fill_sparse, fill_starts

SAMPLES = 100_000


def audit(store: Datastore, *, full: bool = False) -> None:
    """Check the counts, the tables and the suffix arrays in a store that was opened with `verify`.

    Counts and tables are compared with the tokens, all of them. That the suffix array is a permutation of the suffixes
    is checked by sums of its entries and of their squares, and that it is sorted on `SAMPLES` neighbours; with `full`
    both are proved for every entry, in a byte of memory per token.

    Raises:
        DatastoreError: the first thing that is wrong, with its file.
    """
    for entry, sub in zip(store.manifest.sub_indices, store.snapshot.sub_indices, strict=True):
        folder = store.path / entry.name

        def require(right: bool, role: Role, wrong: str, folder: Path = folder) -> None:
            if not right:
                raise DatastoreError(f"{folder / file_name(role)} is wrong: {wrong}; {REBUILD}")

        tokens, order = sub.tokens[: sub.n], sub.suffix_array
        n_documents, largest, sums = _facts(tokens, order)
        require(
            (n_documents, largest) == (entry.n_documents, entry.max_token),
            "tokens",
            "document count or largest id differ from the manifest's",
        )
        require(not len(tokens) or tokens[-1] == SEPARATOR, "tokens", "the last document is not closed")
        starts, sparse = np.zeros_like(sub.bucket_starts), np.zeros_like(sub.sparse_index)
        fill_starts(sub.tokens, starts)
        require(np.array_equal(starts, sub.bucket_starts), "bucket_starts", "it does not agree with the tokens")
        fill_sparse(sub.tokens, order, sparse)
        agrees = np.array_equal(sparse, sub.sparse_index)
        require(agrees, "sparse_index", "it does not agree with the tokens and the suffix array")
        permutes = not any(sums) and (not full or _is_permutation(tokens, order))
        require(permutes, "suffix_array", "it is no permutation of the suffixes")
        at = _first_unsorted(sub.tokens, order, 1 if full else max(1, len(order) // SAMPLES))
        require(at < 0, "suffix_array", f"not sorted at entry {at}")


@compiled(nogil=True)
def _facts(tokens, order):
    """Return separators, largest id, and sums of suffixes and of their squares less those of `order` (mod 2^64)."""
    separators, largest, sums, squares = 0, SEPARATOR, np.uint64(0), np.uint64(0)
    for i in range(len(tokens)):
        largest = max(largest, tokens[i])
        if tokens[i] == SEPARATOR:
            separators += 1
        else:
            sums += np.uint64(i)
            squares += np.uint64(i) * np.uint64(i)
    for p in order:
        sums -= np.uint64(p)
        squares -= np.uint64(p) * np.uint64(p)
    return separators, largest, (sums, squares)


@compiled(nogil=True)
def _is_permutation(tokens, order):
    """Return whether each suffix stands once in an order of as many entries."""
    seen = np.zeros(len(tokens), np.bool_)
    for p in order:
        if seen[p] or tokens[p] == SEPARATOR:
            return False
        seen[p] = True
    return True


@compiled(nogil=True)
def _first_unsorted(tokens, order, step):
    """Compare every `step`-th suffix with its successor; return the first that should come later, or -1."""
    for i in range(0, len(order) - 1, step):
        if before(tokens, order[i + 1], order[i], 0):
            return i
    return -1
