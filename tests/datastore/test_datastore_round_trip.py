from __future__ import annotations

import stat
import struct
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sssd_plugin.datastore.build.builder import StoreBuilder
from sssd_plugin.datastore.disk.format import digest
from sssd_plugin.datastore.disk.store import Datastore, audit
from sssd_plugin.datastore.errors import DatastoreError
from sssd_plugin.datastore.index.sub_index import PAD, SEPARATOR, SubIndex
from tests.support.stores import brute_force, build_store, documents_of, keys_of, leftovers, look_up

HUGE = 2**31 - 1


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
        with Datastore.open(target, vocab_size=vocab_size) as store:
            audit(store, full=True)
            audit(store)
            subs = store.snapshot.sub_indices
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


def test_files_hold_the_arrays_of_the_sub_index(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 50, rng.integers(1, 400)).tolist() for _ in range(40)]
    build_store(tmp_path / "store", documents, 64, sub_index_tokens=3_000)
    with Datastore.open(tmp_path / "store") as store:
        assert len(store.snapshot.sub_indices) == -(-(sum(map(len, documents)) + len(documents)) // 3_000) > 2
        for sub in store.snapshot.sub_indices:
            built = SubIndex.build(np.array(sub.tokens[: sub.n]), 64)
            for name in ("tokens", "bucket_starts", "sparse_index"):
                assert np.array_equal(getattr(sub, name), getattr(built, name)), name
            assert np.array_equal(keys_of(sub), keys_of(built)), "in any order where they are equal"
            assert sub.n <= 3_000
            assert sub.tokens.ctypes.data % 4096 == 0, "mapped from the start of a page"
            assert not sub.tokens.flags.writeable


FIRST = """{
 "format": "freedraft-datastore", "format_version": 1, "requires": [], "vocab_size": 4, "tokenizer": null,
 "separator": -1, "padding": 32, "block_bytes": 67108864, "created_at": "2026-11-26T01:44:27Z",
 "created_by": "freedraft 0.1.0", "sub_indices": [{"name": "0000-219cf4dd", "n_tokens": 5, "n_documents": 2,
 "max_token": 2, "files": {
  "tokens": {"size": 156, "crc32": ["e692feca"],
   "sha256": ["92d23b5856d93e19b8b79e216a412b06b98e706b5e9e483cd6671e499bb19e33"]},
  "suffix_array": {"size": 20, "crc32": ["fc8aa7de"],
   "sha256": ["bd23d79a24b97a7a7682e2ac9fbc19904b5f80a2edd65805bc2fb63bfe5124a7"]},
  "bucket_starts": {"size": 20, "crc32": ["0775b72b"],
   "sha256": ["84e44eb3cbc4d91a5712129ee1b965bf0c10960c10dc3b65cb167981ac355464"]},
  "sparse_index": {"size": 4, "crc32": ["ffffffff"],
   "sha256": ["ad95131bc0b799c0b1af477fb14fcf26a6a9f76079e48bf090acb7e8367bfd0e"]}},
 "n_sections": 0}], "learnt": null, "checksum": "e82a3da6"}"""


def test_stores_of_the_first_version_open(tmp_path: Path) -> None:
    """This one is byte by byte what freedraft 0.1.0 wrote."""
    folder = tmp_path / "0000-219cf4dd"
    folder.mkdir()
    (tmp_path / "manifest.json").write_text(FIRST)
    arrays = {
        "tokens": [1, 2, 1, -1, 2, 1, -1, *[-1] * 32],
        "suffix_array": [2, 5, 0, 1, 4],
        "bucket_starts": [0, 0, 3, 5, 5],
        "sparse_index": [-1],
    }
    for name, numbers in arrays.items():
        (folder / f"{name}.i32").write_bytes(struct.pack(f"<{len(numbers)}i", *numbers))
    with Datastore.open(tmp_path, vocab_size=4, sha256=digest(tmp_path)) as store:
        audit(store, full=True)
        assert documents_of(store.snapshot.sub_indices[0]) == [[1, 2, 1], [2, 1]]
    build_store(tmp_path / "again", [[1, 2, 1], [2, 1]], 4)
    assert {path.stem for path in (tmp_path / "again").rglob("*.i32")} == set(arrays)


def test_ids_up_to_the_largest_do_not_wrap(tmp_path: Path) -> None:
    ids = [0, 32_767, 32_768, 65_535, 65_536, 2**20 - 1, 2**20, 2**24, 2**30, HUGE - 1, HUGE]
    documents = [[i, 5, i] for i in ids] + [ids]
    manifest = build_store(tmp_path / "store", documents, 2**31)
    assert (manifest.max_token, manifest.vocab_size) == (HUGE, 2**31)
    with Datastore.open(tmp_path / "store", vocab_size=2**31) as store:
        audit(store, full=True)
        (sub,) = store.snapshot.sub_indices
        assert documents_of(sub) == documents
        assert len(sub.bucket_starts) == 2**20 + 1
        for query in [[i, 5] for i in ids] + [[i] for i in ids]:
            found = look_up(sub, query)
            assert found == brute_force(sub, query) and len(found) >= 1


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, np.uint32])
def test_ids_that_an_int32_cannot_hold_are_refused(tmp_path: Path, dtype: type) -> None:
    for wrong in (2**31, 2**32 - 1):
        with (
            StoreBuilder(tmp_path / "store", vocab_size=2**31) as builder,
            pytest.raises(DatastoreError, match=f"token id {wrong} is outside the vocabulary"),
        ):
            builder.append(np.array([1, wrong], dtype))
    assert list(tmp_path.iterdir()) == []


def test_ids_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    with StoreBuilder(tmp_path / "store", vocab_size=10) as builder:
        for wrong in (10, -2):
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
        with Datastore.open(tmp_path / str(size)) as store:
            assert documents_of(store.snapshot.sub_indices[0]) == [[1, 2], [3, 4, 5], [6]]


def test_a_long_document_is_cut_at_full_sub_indices_only(tmp_path: Path) -> None:
    manifest = build_store(tmp_path / "store", [list(range(1_000))], 1_000, sub_index_tokens=128)
    assert [sub.n_tokens for sub in manifest.sub_indices] == [127] * 7 + [111]


def test_permissions(tmp_path: Path) -> None:
    build_store(tmp_path / "store", [[1, 2, 3]], 10)
    for path in [tmp_path / "store", *(tmp_path / "store").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_bytes_per_token(tmp_path: Path) -> None:
    manifest = build_store(tmp_path / "store", [np.arange(200_000) % 999], 1_000)
    on_disk = sum(path.stat().st_size for path in (tmp_path / "store").rglob("*.i32"))
    assert manifest.size == on_disk
    assert on_disk / manifest.n_tokens < 8.4
    assert on_disk == 4 * (200_001 + PAD) + 4 * 200_000 + 4 * 1_001 + 200_000 // 4


def test_close_lets_go_but_a_snapshot_stays_valid(tmp_path: Path) -> None:
    build_store(tmp_path / "store", [[1, 2, 3]], 10)
    store = Datastore.open(tmp_path / "store")
    snapshot = store.snapshot
    store.close()
    store.close()
    with pytest.raises(ValueError, match="closed"):
        _ = store.snapshot
    assert documents_of(snapshot.sub_indices[0]) == [[1, 2, 3]]


def test_replacing_keeps_open_stores_valid(tmp_path: Path) -> None:
    build_store(tmp_path / "store", [[1, 2, 3]], 10)
    with Datastore.open(tmp_path / "store") as old:
        build_store(tmp_path / "store", [[4, 5]], 10, replace=True)
        assert documents_of(old.snapshot.sub_indices[0]) == [[1, 2, 3]]
    with Datastore.open(tmp_path / "store") as new:
        assert documents_of(new.snapshot.sub_indices[0]) == [[4, 5]]
    assert leftovers(tmp_path) == []


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_processes_share_one_copy(tmp_path: Path) -> None:
    """All arrays are shared read-only maps of the files, so that the page cache holds the only copy."""
    build_store(tmp_path / "store", [[1, 2, 3]] * 50, 10)
    with Datastore.open(tmp_path / "store") as store:
        assert store.snapshot.sub_indices
        lines = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line]
        assert len(lines) == 4 and {line[1] for line in lines} == {"r--s"}
