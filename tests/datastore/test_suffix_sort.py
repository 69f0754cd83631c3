from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from sssd_plugin.datastore.index.sub_index import PAD, SEPARATOR, SubIndex
from sssd_plugin.datastore.index.suffix_sort import DEPTH, sort_sections

HUGE = 2**31 - 1
IDS = st.one_of(st.integers(-1, 3), st.integers(-1, 70_000), st.integers(HUGE - 3, HUGE), st.integers(-1, HUGE))


def key(tokens: list[int], start: int) -> list[int]:
    """What a suffix is sorted by."""
    end = tokens.index(SEPARATOR, start) if SEPARATOR in tokens[start:] else len(tokens)
    return tokens[start : min(end, start + DEPTH)]


@settings(deadline=None)
@given(st.lists(st.lists(IDS, max_size=60), min_size=1, max_size=4))
def test_each_section_is_sorted_for_itself(sections: list[list[int]]) -> None:
    closed = [[*section, SEPARATOR] for section in sections]
    tokens = [token for section in closed for token in section]
    ends = np.cumsum([len(section) for section in closed])
    order, starts, sparse = sort_sections(np.array(tokens + [SEPARATOR] * PAD, np.int32), ends, 4)
    at = begin = 0
    expected_sparse = []
    for section, end in zip(closed, ends.tolist(), strict=True):
        suffixes = [i for i in range(begin, end) if tokens[i] != SEPARATOR]
        part = order[at : at + len(suffixes)].tolist()
        assert sorted(part) == suffixes
        keys = [key(section, i - begin) for i in part]
        assert keys == sorted(keys)
        expected_sparse += [tokens[i + 1] for i in part[::16]]
        at, begin = at + len(suffixes), end
    assert at == len(order) and sparse.tolist() == expected_sparse
    assert len(starts) == (5 if len(sections) == 1 else 1)


def test_text_that_repeats_for_ever_takes_no_longer() -> None:
    tokens = np.zeros(1_000_000, np.int32)
    tokens[-1] = SEPARATOR
    sub = SubIndex.build(tokens, 10)
    assert np.array_equal(np.sort(sub.suffix_array), np.arange(999_999))


def test_long_runs_of_any_ids() -> None:
    for vocab_size, scale in ((100, 1), (5_000, 20_000), (100_000, 20_000)):
        rng = np.random.default_rng(vocab_size)
        tokens = (rng.permutation(300_000) % vocab_size * scale).astype(np.int32)
        tokens[100_000:200_000] = tokens[:100_000]
        tokens[::1_000] = SEPARATOR
        tokens[-1] = SEPARATOR
        sub = SubIndex.build(tokens, vocab_size * scale)
        order, padded = sub.suffix_array.astype(np.int64), sub.tokens
        assert np.array_equal(np.sort(order), np.flatnonzero(tokens != SEPARATOR))
        left, right = order[:-1], order[1:]
        for _ in range(DEPTH):
            assert (padded[left] <= padded[right]).all()
            same = (padded[left] == padded[right]) & (padded[left] != SEPARATOR)
            left, right = left[same] + 1, right[same] + 1
