from __future__ import annotations

import stat
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sssd_plugin.datastore.build.builder import StoreBuilder
from sssd_plugin.datastore.disk.store import Datastore, audit
from sssd_plugin.datastore.errors import DatastoreError
from sssd_plugin.datastore.index.sub_index import SEPARATOR
from tests.support.stores import brute_force, build_store, documents_at, documents_of, leftovers, look_up


@st.composite
def _corpora(draw: st.DrawFn) -> tuple[list[list[int]], int, int | None]:
    """Documents of few different ids, so that they repeat; a vocabulary; a size of sub-indices."""
    vocab_size = draw(st.sampled_from([3, 300, 2**31]))
    ids = draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=4, unique=True))
    documents = draw(st.lists(st.lists(st.sampled_from(ids), max_size=40), max_size=12))
    return documents, vocab_size, draw(st.sampled_from([None, 64, 100]))


@settings(max_examples=60, deadline=None)
@given(_corpora(), st.data())
def test_look_ups_equal_brute_force(corpus: tuple[list[list[int]], int, int | None], data: st.DataObject) -> None:
    documents, vocab_size, sub_index_tokens = corpus
    kept = [d for d in documents if d]
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "store"
        if not kept:
            with pytest.raises(DatastoreError, match="no tokens"):
                build_store(target, documents, vocab_size, sub_index_tokens=sub_index_tokens)
            assert list(Path(folder).iterdir()) == []
            return
        build_store(target, documents, vocab_size, sub_index_tokens=sub_index_tokens)
        store = Datastore.open(target, vocab_size=vocab_size)
        audit(store, full=True)
        audit(store)
        subs = store.snapshot
        # Documents in order, some cut where a sub-index is full.
        stored = [token for sub in subs for document in documents_of(sub) for token in document]
        assert stored == [token for document in kept for token in document]
        assert store.manifest.n_tokens == len(stored)
        if len(subs) == 1:
            assert documents_of(subs[0]) == kept
        ids = sorted(set(stored))
        for _ in range(5):
            query = data.draw(st.lists(st.sampled_from(ids), min_size=1, max_size=5))
            for sub in subs:
                assert look_up(sub, query) == brute_force(sub, query)


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    with StoreBuilder(tmp_path / "store", vocab_size=10) as builder:
        for wrong in (10, -2, 2**31, 2**32 - 1):
            with pytest.raises(DatastoreError, match=f"token id {wrong} .* vocabulary of 10.*--vocab-size"):
                builder.append(np.array([1, wrong]))
        with pytest.raises(DatastoreError, match="one-dimensional integer array"):
            builder.append(np.array([0.5]))


def test_tokens_may_come_in_any_pieces(tmp_path: Path) -> None:
    stream = np.array([SEPARATOR, 1, 2, SEPARATOR, SEPARATOR, SEPARATOR, 3, 4, 5, SEPARATOR, 6], np.int16)
    for size in (1, 2, 3, 11):
        with StoreBuilder(tmp_path / str(size), vocab_size=10) as builder:
            for a in range(0, len(stream), size):
                builder.append(stream[a : a + size])
            manifest = builder.finish()
        assert (manifest.n_tokens, manifest.n_documents) == (6, 3)
        assert documents_at(tmp_path / str(size)) == [[1, 2], [3, 4, 5], [6]]


def test_files_are_for_their_owner_and_shared_by_processes(tmp_path: Path) -> None:
    """All arrays are read-only maps of the files, so that the page cache holds the only copy."""
    build_store(tmp_path / "store", [[1, 2, 3]] * 50, 10)
    for path in [tmp_path / "store", *(tmp_path / "store").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    store = Datastore.open(tmp_path / "store")
    assert store.snapshot
    lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
    assert len(lines) == 4 and {line[1] for line in lines} == {"r--s"}


def test_snapshots_outlive_their_store_and_its_replacement(tmp_path: Path) -> None:
    build_store(tmp_path / "store", [[1, 2, 3]], 10)
    store = Datastore.open(tmp_path / "store")
    snapshot = store.snapshot
    build_store(tmp_path / "store", [[4, 5]], 10, replace=True)
    assert documents_of(store.snapshot[0]) == [[1, 2, 3]]
    del store
    assert documents_of(snapshot[0]) == [[1, 2, 3]]
    assert documents_at(tmp_path / "store") == [[4, 5]] and leftovers(tmp_path) == []
