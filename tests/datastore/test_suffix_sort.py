"""Sub-indices and runs: what sorting, merging and leaving out make is in order and finds every occurrence."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sssd_plugin.datastore.build import divsufsort
from sssd_plugin.datastore.build.builder import sort
from sssd_plugin.datastore.index.runs import merged, sorted_run, without
from sssd_plugin.datastore.index.sub_index import DEPTH, PADDING, SEPARATOR, SPARSE_STEP, SubIndex
from tests.support.stores import brute_force, documents_of, int32, joined, keys_of, look_up

HUGE = 2**31 - 1
IDS = st.one_of(st.integers(0, 3), st.integers(0, 70_000), st.integers(HUGE - 3, HUGE), st.integers(0, HUGE))
Documents = list[list[int]]
documents = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=6)


def about(first: int, number: int) -> np.ndarray:
    """Rows of `Run.documents`, each its own."""
    numbers = np.arange(first, first + number)
    return np.stack([1000 + numbers, 5 * numbers, numbers], axis=1)


def check(sub: SubIndex, texts: Documents) -> list[list[int]]:
    """Documents, order, buckets and fences; the keys that the order goes by."""
    assert documents_of(sub) == texts
    order = sub.suffix_array
    assert sorted(order.tolist()) == np.flatnonzero(sub.tokens >= 0).tolist()
    assert sub.sparse_index.tolist() == sub.tokens[order[::SPARSE_STEP] + 1].tolist()
    keys, firsts = keys_of(sub).tolist(), sub.tokens[order]
    assert keys == sorted(keys)
    for token in range(len(sub.bucket_starts) - 1):
        a, b = sub.bucket_starts[token : token + 2]
        assert (firsts[a:b] == token).all() and int((firsts == token).sum()) == b - a
    return keys


@settings(deadline=None)
@given(st.lists(st.lists(IDS, max_size=60), min_size=1, max_size=4))
def test_both_sorts_agree(texts: Documents) -> None:
    """`pydivsufsort` knows nothing of ours."""
    tokens = int32(joined(texts))
    padded, largest = np.concatenate([tokens, PADDING]), int(tokens.max(initial=0))
    assert divsufsort.can_sort(len(tokens), largest, 1 << 40)
    ours, theirs = SubIndex.build(tokens, 8), SubIndex(*sort(padded, largest, 8, 1 << 40))
    assert check(ours, texts) == check(theirs, texts)
    assert theirs.bucket_starts.tolist() == ours.bucket_starts.tolist() and len(ours.bucket_starts) == 9


@settings(deadline=None, max_examples=150)
@given(documents, documents, st.integers(0, 4096))
def test_runs(older: Documents, newer: Documents, bits: int) -> None:
    """Sorted at once, one document after the other, merged; then without some."""
    texts = [*older, *newer]
    at_once = [
        sorted_run([int32(text) for text in part], 4, about(i, len(part)))
        for i, part in ((0, older), (len(older), newer))
    ]
    both, grown = merged(*at_once, 4), None
    for number, text in enumerate(texts):
        grown = merged(grown, sorted_run([int32(text)], 4, about(number, 1)), 4)
    assert grown is not None
    for run in (both, grown):
        check(run.sub, texts)
        assert np.array_equal(run.documents, about(0, len(texts)))
    for query in ([0], [1, 2], [2, 2, 2], [3, 0, 1, 3]):
        assert look_up(both.sub, query) == brute_force(both.sub, query)
    assert both.starts.tolist() == np.cumsum([0, *(len(text) + 1 for text in texts)])[:-1].tolist()
    keep = np.array([not bits >> i & 1 for i in range(len(texts))])
    kept = np.flatnonzero(keep).tolist()
    left = without(both, 4, keep)
    assert (left is None) == (not kept)
    if left is not None:
        check(left.sub, [texts[i] for i in kept])
        assert np.array_equal(left.documents, about(0, len(texts))[kept])


@pytest.mark.parametrize("pattern", [[5], [7, 7, 7, 3]])
def test_text_that_repeats_for_ever_costs_no_more(pattern: list[int]) -> None:
    """A full comparison of suffixes would take minutes here."""
    text = int32((pattern * 60_000)[:60_000])
    run = sorted_run([text, text], 10, about(0, 2))
    both = merged(run, run, 10)
    assert np.array_equal(np.sort(both.sub.suffix_array), np.flatnonzero(both.sub.tokens != SEPARATOR))
    sample = keys_of(both.sub)[::1000].tolist()
    assert sample == sorted(sample)


@pytest.mark.parametrize(("vocab_size", "scale"), [(100, 1), (5_000, 20_000), (100_000, 20_000)])
def test_long_runs_of_any_ids(vocab_size: int, scale: int) -> None:
    rng = np.random.default_rng(vocab_size)
    tokens = (rng.permutation(300_000) % vocab_size * scale).astype(np.int32)
    tokens[100_000:200_000] = tokens[:100_000]
    tokens[::1_000] = SEPARATOR
    tokens[-1] = SEPARATOR
    sub = SubIndex.build(tokens, vocab_size * scale)
    assert np.array_equal(np.sort(sub.suffix_array), np.flatnonzero(tokens != SEPARATOR))
    left, right = sub.suffix_array[:-1].astype(np.int64), sub.suffix_array[1:].astype(np.int64)
    for _ in range(DEPTH):  # of neighbours that are equal so far
        assert (sub.tokens[left] <= sub.tokens[right]).all()
        same = (sub.tokens[left] == sub.tokens[right]) & (sub.tokens[left] != SEPARATOR)
        left, right = left[same] + 1, right[same] + 1
