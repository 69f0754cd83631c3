"""Stores of bench/drafter.py that are not sorted."""

from __future__ import annotations

import numpy as np

from bench.drafter import repeated
from sssd_plugin.datastore.index.sub_index import SEPARATOR, SubIndex


def test_copies_of_a_store_are_as_if_sorted() -> None:
    tokens = np.random.default_rng(1).integers(SEPARATOR, 5, 2000).astype(np.int32)
    tokens[-1] = SEPARATOR
    found, built = repeated(SubIndex.build(tokens, 8), 3), SubIndex.build(np.tile(tokens, 3), 8)

    def suffixes(index: SubIndex) -> list[list[int]]:
        text = index.tokens.tolist()
        return [text[start : text.index(SEPARATOR, start)] for start in index.suffix_array.tolist()]

    assert suffixes(found) == suffixes(built)
    assert sorted(found.suffix_array) == sorted(built.suffix_array)
    for name in ("tokens", "bucket_starts", "sparse_index"):
        assert (getattr(found, name) == getattr(built, name)).all(), name
