from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sssd_plugin.datastore.build.sorting import sort
from sssd_plugin.datastore.index import byte_sort
from sssd_plugin.datastore.index.sub_index import PADDING, SEPARATOR, SubIndex
from sssd_plugin.datastore.index.suffix_sort import DEPTH
from tests.support.stores import int32, joined, keys_of

HUGE = 2**31 - 1
IDS = st.one_of(st.integers(0, 3), st.integers(0, 70_000), st.integers(HUGE - 3, HUGE), st.integers(0, HUGE))


def by_bytes(tokens: np.ndarray) -> SubIndex:
    """As `pydivsufsort` sorts, which knows nothing of ours."""
    padded = np.concatenate([tokens, PADDING])
    assert byte_sort.installed()
    arrays = sort(padded, 8, 1 << 40)
    return SubIndex(padded, *arrays.values())


@settings(deadline=None)
@given(st.lists(st.lists(IDS, max_size=60), min_size=1, max_size=4))
def test_suffixes_are_in_order(documents: list[list[int]]) -> None:
    tokens = int32(joined(documents))
    ours, theirs = SubIndex.build(tokens, 8), by_bytes(tokens)
    suffixes = np.flatnonzero(tokens != SEPARATOR).tolist()
    for sub in (ours, theirs):
        assert sorted(sub.suffix_array.tolist()) == suffixes
        assert sub.sparse_index.tolist() == sub.tokens[sub.suffix_array[::16] + 1].tolist()
        assert len(sub.bucket_starts) == 9
    keys = [tuple(key) for key in keys_of(ours).tolist()]
    assert keys == sorted(keys) and keys_of(theirs).tolist() == keys_of(ours).tolist()
    assert theirs.bucket_starts.tolist() == ours.bucket_starts.tolist()


def test_text_that_repeats_for_ever_takes_no_longer() -> None:
    tokens = np.zeros(1_000_000, np.int32)
    tokens[-1] = SEPARATOR
    sub = SubIndex.build(tokens, 10)
    assert np.array_equal(np.sort(sub.suffix_array), np.arange(999_999))


@pytest.mark.parametrize(("vocab_size", "scale"), [(100, 1), (5_000, 20_000), (100_000, 20_000)])
def test_long_runs_of_any_ids(vocab_size: int, scale: int) -> None:
    rng = np.random.default_rng(vocab_size)
    tokens = (rng.permutation(300_000) % vocab_size * scale).astype(np.int32)
    tokens[100_000:200_000] = tokens[:100_000]
    tokens[::1_000] = SEPARATOR
    tokens[-1] = SEPARATOR
    ours, theirs = SubIndex.build(tokens, vocab_size * scale), by_bytes(tokens)
    assert np.array_equal(np.sort(ours.suffix_array), np.flatnonzero(tokens != SEPARATOR))
    left, right = ours.suffix_array.astype(np.int64), theirs.suffix_array.astype(np.int64)
    for _ in range(DEPTH):
        assert np.array_equal(ours.tokens[left], ours.tokens[right])
        left, right = (s[ours.tokens[s] != SEPARATOR] + 1 for s in (left, right))
