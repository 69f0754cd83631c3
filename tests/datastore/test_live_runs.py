"""Runs: what compiled sorting and merging make finds every occurrence, whatever the text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sssd_plugin.datastore.build.memory import resident_bytes
from sssd_plugin.datastore.index.runs import Run, merged, release, sorted_run, with_document, without
from sssd_plugin.datastore.index.sub_index import SPARSE_STEP
from tests.support.stores import brute_force, documents_of, keys_of, look_up

Documents = list[list[int]]
documents = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=6)


def arrays(texts: Documents) -> list[np.ndarray]:
    return [np.array(text, np.int32) for text in texts]


def about(first: int, number: int) -> np.ndarray:
    """Rows of `Run.documents`, each its own."""
    numbers = np.arange(first, first + number)
    return np.stack([1000 + numbers, 5 * numbers, numbers], axis=1)


def check(run: Run, texts: Documents) -> None:
    """Documents, order, buckets and fences of a run."""
    assert documents_of(run.sub) == texts
    order = run.sub.suffix_array
    assert sorted(order.tolist()) == np.flatnonzero(run.sub.tokens >= 0).tolist()
    keys = keys_of(run.sub).tolist()
    assert keys == sorted(keys)
    assert run.sub.sparse_index.tolist() == run.sub.tokens[order[::SPARSE_STEP] + 1].tolist()
    for query in ([0], [1, 2], [2, 2, 2], [3, 0, 1, 3]):
        assert look_up(run.sub, query) == brute_force(run.sub, query)
    if len(run.sub.bucket_starts) > 1:
        firsts = run.sub.tokens[order]
        for token in range(len(run.sub.bucket_starts) - 1):
            a, b = run.sub.bucket_starts[token : token + 2]
            assert (firsts[a:b] == token).all() and int((firsts == token).sum()) == b - a


@settings(deadline=None, max_examples=150)
@given(documents)
def test_sorting_and_adding_one_by_one_agree(texts: Documents) -> None:
    check(sorted_run(arrays(texts), 4, about(0, len(texts))), texts)
    run = None
    for number, document in enumerate(arrays(texts)):
        run = with_document(run, document, 4, about(number, 1))
    assert run is not None
    check(run, texts)
    assert np.array_equal(run.documents, about(0, len(texts)))


@settings(deadline=None, max_examples=150)
@given(documents, documents, st.integers(0, 120), st.integers(0, 4096))
def test_merging_and_leaving_out(older: Documents, newer: Documents, excess: int, bits: int) -> None:
    """Documents that start in the first `excess` tokens, and any others."""
    a, b = (sorted_run(arrays(texts), 4, about(i, len(texts))) for i, texts in ((0, older), (len(older), newer)))
    both = merged(a, b, 4)
    texts = [*older, *newer]
    check(both, texts)
    assert np.array_equal(both.documents, about(0, len(texts)))
    keep = np.array([not bits >> i & 1 for i in range(len(texts))])
    starts = np.cumsum([0, *(len(text) + 1 for text in texts)])[:-1]
    kept = [i for i in range(len(texts)) if starts[i] >= excess and keep[i]]
    left = without(both, 4, keep, excess)
    if not kept:
        assert left is None
        return
    assert left is not None
    check(left, [texts[i] for i in kept])
    assert np.array_equal(left.documents, about(0, len(texts))[kept])


@pytest.mark.parametrize("pattern", [[5], [1, 2], [7, 7, 7, 3]])
def test_text_that_repeats_for_ever_costs_no_more(pattern: list[int]) -> None:
    """A full comparison of suffixes would take minutes here."""
    text = (pattern * 200_000)[:200_000]
    run = sorted_run(arrays([text, text]), 10, about(0, 2))
    assert len(run.sub.suffix_array) == 400_000
    joined = merged(run, run, 10)
    assert joined.n == 2 * run.n
    sample = keys_of(joined.sub)[::5000].tolist()
    assert sample == sorted(sample)


def test_runs_that_nobody_holds_are_given_back() -> None:
    """Not before: who still holds one reads what it always held."""
    documents = [np.full(50_000, i, np.int32) for i in range(8)]
    runs = [sorted_run(documents, 100, about(0, 8)) for _ in range(3)]
    held = runs[1]
    before = held.sub.tokens.copy(), held.sub.suffix_array.copy()
    here = resident_bytes()
    left = release(runs)
    assert left == [held] and here - resident_bytes() > 5_000_000
    assert np.array_equal(held.sub.tokens, before[0]) and np.array_equal(held.sub.suffix_array, before[1])
    runs = left
    del held, left
    assert release(runs) == []
