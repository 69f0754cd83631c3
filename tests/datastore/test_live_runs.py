"""Runs: what compiled sorting and merging make finds every occurrence, whatever the text."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sssd_plugin.datastore.build.memory import resident_bytes
from sssd_plugin.datastore.index.runs import DEPTH, Run, merged, release, sorted_run, with_document
from sssd_plugin.datastore.index.sub_index import SPARSE_STEP
from tests.support.stores import brute_force, documents_of, look_up

Documents = list[list[int]]
documents = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=40), min_size=1, max_size=6)


def arrays(texts: Documents) -> list[np.ndarray]:
    return [np.array(text, np.int32) for text in texts]


def key(run: Run, place: int) -> list[int]:
    """What of a suffix its order depends on."""
    tokens = run.sub.tokens[place : place + DEPTH].tolist()
    return tokens[: tokens.index(-1) + 1] if -1 in tokens else tokens


def check(run: Run, texts: Documents) -> None:
    """Documents, order, buckets and fences of a run."""
    assert documents_of(run.sub) == texts
    order = run.sub.suffix_array
    assert sorted(order.tolist()) == np.flatnonzero(run.sub.tokens >= 0).tolist()
    keys = [key(run, int(place)) for place in order]
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
    check(sorted_run(arrays(texts), 4, 0), texts)
    run = None
    for number, document in enumerate(arrays(texts)):
        run = with_document(run, document, 4, number)
    assert run is not None
    check(run, texts)
    assert (run.first, run.last) == (0, len(texts) - 1)


@settings(deadline=None, max_examples=150)
@given(documents, documents, st.integers(0, 120))
def test_merging_and_dropping_the_oldest(older: Documents, newer: Documents, cut: int) -> None:
    a, b = sorted_run(arrays(older), 4, 0), sorted_run(arrays(newer), 4, len(older))
    kept, start = [], 0
    for text in older:
        if start >= cut:
            kept.append(text)
        start += len(text) + 1
    both = merged(a, b, 4, cut)
    assert both is not None
    check(both, [*kept, *newer])
    alone = merged(a, None, 4, cut)
    if kept:
        assert alone is not None
        check(alone, kept)
    else:
        assert alone is None


@pytest.mark.parametrize("pattern", [[5], [1, 2], [7, 7, 7, 3]])
def test_text_that_repeats_for_ever_costs_no_more(pattern: list[int]) -> None:
    """A full comparison of suffixes would take minutes here."""
    text = (pattern * 200_000)[:200_000]
    run = sorted_run(arrays([text, text]), 10, 0)
    assert len(run.sub.suffix_array) == 400_000
    joined = merged(run, run, 10)
    assert joined is not None and joined.n == 2 * run.n
    sample = [key(joined, int(place)) for place in joined.sub.suffix_array[::5000]]
    assert sample == sorted(sample)


def test_a_sorting_by_bytes_is_in_this_order_too() -> None:
    from sssd_plugin.datastore.index.sub_index import SubIndex

    rng = np.random.default_rng(2)
    texts = [(rng.zipf(1.3, 400) % 50).tolist() for _ in range(20)]
    run = sorted_run(arrays(texts), 50, 0)
    full = SubIndex.build(run.sub.tokens[: run.n], 50)
    assert [key(run, int(p)) for p in full.suffix_array] == [key(run, int(p)) for p in run.sub.suffix_array]


def test_runs_that_nobody_holds_are_given_back() -> None:
    """Not before: who still holds one reads what it always held."""
    documents = [np.full(50_000, i, np.int32) for i in range(8)]
    runs = [sorted_run(documents, 100, 0) for _ in range(3)]
    held = runs[1]
    before = held.sub.tokens.copy(), held.sub.suffix_array.copy()
    here = resident_bytes()
    left = release(runs)
    assert left == [held] and here - resident_bytes() > 5_000_000
    assert np.array_equal(held.sub.tokens, before[0]) and np.array_equal(held.sub.suffix_array, before[1])
    runs = left
    del held, left
    assert release(runs) == []
