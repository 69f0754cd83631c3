from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sssd_plugin.datastore.index import suffix_sort
from sssd_plugin.datastore.index.sub_index import SEPARATOR, SubIndex

HUGE = 2**31 - 1
IDS = st.one_of(st.integers(-1, 3), st.integers(-1, 70_000), st.integers(HUGE - 3, HUGE), st.integers(-1, HUGE))


@settings(deadline=None)
@given(st.lists(IDS, max_size=60))
def test_order_equals_sorting_the_suffixes(tokens: list[int]) -> None:
    expected = sorted((i for i in range(len(tokens)) if tokens[i] != SEPARATOR), key=lambda i: tokens[i:])
    assert suffix_sort.sort_suffixes(np.array(tokens, np.int32)).tolist() == expected


@pytest.mark.parametrize(("distinct", "width"), [(200, 1), (256, 1), (257, 2), (65_536, 2), (65_537, 3), (1 << 24, 3)])
def test_width(distinct: int, width: int) -> None:
    assert suffix_sort.width_of(distinct) == width


@pytest.mark.parametrize("scale", [1, 20_000])  # a table of ranks, or a search
@pytest.mark.parametrize("vocab_size", [100, 5_000, 100_000])
def test_long_runs_equal_the_sub_index(scale: int, vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    tokens = (rng.permutation(300_000) % vocab_size * scale).astype(np.int32)
    tokens[100_000:200_000] = tokens[:100_000]
    tokens[::1_000] = SEPARATOR
    order = suffix_sort.sort_suffixes(tokens)
    assert np.array_equal(order, SubIndex.build(tokens, vocab_size * scale).suffix_array)
    assert np.array_equal(np.sort(order), np.flatnonzero(tokens != SEPARATOR))
    text = suffix_sort.to_bytes(tokens)
    assert text.shape == (len(tokens), suffix_sort.width_of(len(np.unique(tokens))))
