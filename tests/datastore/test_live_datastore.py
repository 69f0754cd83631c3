"""The live datastore: visible at the next step, few sub-indices, bounded, tenants apart, the same on every rank."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sssd_plugin.datastore.live import runs
from sssd_plugin.datastore.live.runs import SEARCHED, LearntRuns
from sssd_plugin.datastore.live.store import LiveStore
from sssd_plugin.drafter import Drafter
from tests.support.stores import documents_of, number_in, snapshot_of
from tests.support.waiting import wait_until

VOCAB = 500


@pytest.fixture(autouse=True)
def small_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MEMTABLE_TOKENS", 64)


@pytest.fixture
def store() -> Iterator[LiveStore]:
    store = LiveStore(VOCAB, isolation="shared", max_tokens=1 << 16)
    yield store
    store.close()


def document(seed: int, n: int = 40) -> np.ndarray:
    return (np.random.default_rng(seed).zipf(1.3, n) % VOCAB).astype(np.int32)


def contents(store: LiveStore, tenant: int = 0) -> list[list[int]]:
    """Documents that a tenant sees besides the static ones, oldest first."""
    return [text for run in store.runs.tenants[tenant].all_runs for text in documents_of(run.sub)]


def chain(drafter: Drafter, request: str, tokens: list[int], n: int = 6) -> list[int]:
    drafter.replace(request, np.array(tokens, np.int32))
    batch = drafter.draft([request], max_nodes=n, shape="chain")
    return batch.tokens[0, 1 : batch.counts[0]].tolist()


@pytest.mark.parametrize("scoring", ["learned", "paper"])
def test_what_a_request_wrote_is_drafted_at_the_next_step(scoring: str) -> None:
    """Beside the static store, which may change."""
    store = LiveStore(VOCAB, isolation="shared", static=snapshot_of([[[1, 2, 3, 50, 51]]], VOCAB))
    drafter = Drafter(vocab_size=VOCAB, max_nodes=8, scoring=scoring, live=store)  # type: ignore[arg-type]
    assert chain(drafter, "x", [1, 2, 3])[:2] == [50, 51]
    assert chain(drafter, "y", [4, 5, 6]) == []
    store.insert(np.array([7, 4, 5, 6, 60, 61], np.int32))
    assert chain(drafter, "y", [4, 5, 6])[:2] == [60, 61]
    drafter.use(snapshot_of([[[1, 2, 3, 70, 71]]], VOCAB))
    assert chain(drafter, "z", [1, 2, 3])[:2] == [70, 71]
    assert chain(drafter, "y", [4, 5, 6])[:2] == [60, 61]
    store.close()


@pytest.mark.parametrize("static_parts", [0, 1, 4, 9])
def test_at_most_eight_sub_indices_whatever_the_background_does(
    static_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the background thread held up, the newest run grows instead."""
    static = snapshot_of([[document(1, 300)]] * static_parts, VOCAB)
    store = LiveStore(VOCAB, isolation="shared", max_tokens=1 << 18, static=static)
    gate, combined = threading.Event(), LearntRuns._combined
    monkeypatch.setattr(LearntRuns, "_combined", lambda *inputs: (gate.wait(), combined(*inputs))[1])
    for seed in range(300):
        assert store.insert(document(seed))
        assert store.runs.view_of().widest <= SEARCHED
    gate.set()
    assert store.runs.settle()
    assert store.runs.view_of().widest <= SEARCHED
    assert contents(store) == [document(seed).tolist() for seed in range(300)], "nothing lost, in order"
    store.close()


def test_drafting_while_merging_sees_whole_documents() -> None:
    """Every document is findable at every moment after it was inserted, while runs are merged and dropped."""
    store = LiveStore(VOCAB, isolation="shared", max_tokens=1 << 17)
    drafter = Drafter(vocab_size=VOCAB, max_nodes=8, live=store)
    for seed in range(400):
        text = document(seed, 60)
        text[:5] = [VOCAB - 1, seed % 490, seed // 490 + 1, 3, (7 * seed) % 490]
        store.insert(text)
        for old in (seed, seed // 2, 0):
            head = [VOCAB - 1, old % 490, old // 490 + 1, 3]
            drafter.finish(["x"])
            drafter.replace("x", np.array(head, np.int32))
            tree = drafter.draft(["x"], max_nodes=8)
            assert (7 * old) % 490 in tree.tokens[0, : tree.counts[0]][tree.depths[0, : tree.counts[0]] == 1].tolist()
    store.close()


@pytest.mark.parametrize("isolation", ["salt", "strict", "shared"])
def test_tenants_see_only_their_own(isolation: str) -> None:
    """And requests of none only that of one another, or nothing; without isolation all see all. A request that shares
    nothing sees nothing, not even what another one of these wrote."""
    store = LiveStore(VOCAB, isolation=isolation, max_tokens=1 << 16)  # type: ignore[arg-type]
    drafter = Drafter(vocab_size=VOCAB, max_nodes=8, live=store)
    tenants = one, two, none = number_in(store, "one"), number_in(store, "two"), number_in(store, None)
    isolated = isolation != "shared"
    assert len({*tenants}) == 3 and number_in(store, "one") == one and number_in(store, "") == none == 0
    assert not store.insert(np.array([1, 2, 3, 104, 9], np.int32), -1)
    taken = [store.insert(np.array([1, 2, 3, 101 + i, 9], np.int32), tenant) for i, tenant in enumerate(tenants)]
    assert taken == [True, True, isolation != "strict"]
    assert store.stats().dropped == {"tenant": 1 + (isolation == "strict")}
    ids = ["a", "b", "c", "d", "e", "f"]
    for request, tenant in zip(ids, (one, two, none, one, -1, -2), strict=True):
        drafter.set_tenant(request, tenant if isolated else 0)
        drafter.replace(request, np.array([1, 2, 3], np.int32))
    batch = drafter.draft(ids, max_nodes=8)
    seen = [set(batch.tokens[b, 1 : batch.counts[b]].tolist()) & {101, 102, 103, 104} for b in range(6)]
    own = [{101}, {102}, {103} if taken[2] else set(), {101}, set(), set()]
    assert seen == (own if isolated else [{101, 102, 103}] * 6)
    drafter.finish(["a"])
    drafter.replace("a", np.array([1, 2, 3], np.int32))
    batch = drafter.draft(["a"], max_nodes=8)
    left = set(batch.tokens[0, 1 : batch.counts[0]].tolist()) & {101, 102, 103}
    assert left == (own[2] if isolated else {101, 102, 103}), "an id says nothing of its next request's tenant"
    store.close()


def test_another_tenants_text_changes_nothing() -> None:
    """The drafts of one tenant, scores to the last bit, with and without what others wrote."""
    rng = np.random.default_rng(1)
    alone, beside = (LiveStore(VOCAB, max_tokens=1 << 16) for _ in range(2))
    drafters = [Drafter(vocab_size=VOCAB, max_nodes=16, live=store) for store in (alone, beside)]
    for seed in range(120):
        alone.insert(document(seed), number_in(alone, "a"))
        beside.insert(document(seed), number_in(beside, "a"))
        for other in ("b", "c", None):
            beside.insert(document(int(rng.integers(1 << 30)), 70), number_in(beside, other))
        alone.runs.settle(), beside.runs.settle()
        prompt = document(seed)[:12]
        results = []
        for store, drafter in zip((alone, beside), drafters, strict=True):
            drafter.set_tenant("mine", number_in(store, "a"))
            drafter.set_tenant("theirs", number_in(store, "b"))
            ids = ["theirs", "mine"]
            for request in ids:
                drafter.replace(request, prompt)
            batch = drafter.draft(ids, max_nodes=16)
            n = int(batch.counts[1])
            results.append((batch.tokens[1, :n].tolist(), batch.scores[1, :n].tolist()))
            drafter.finish(ids)
        assert results[0] == results[1]
    alone.close(), beside.close()


def test_who_floods_the_store_drops_its_own_text(tmp_path: Path) -> None:
    """In memory and on the disk; requests without a salt flood it."""
    store = LiveStore(VOCAB, tmp_path, max_tokens=1 << 14)
    quiet, loud, other = (number_in(store, name) for name in ("quiet", None, "other"))
    for seed in range(30):
        assert store.insert(document(seed), quiet)
    for seed in range(3000):
        while not store.insert(document(seed), loud):
            time.sleep(0.001)
        if seed % 2:
            store.insert(document(seed, 20), other)
        if seed % 100 == 0:
            store.flush()
    assert store.runs.settle()
    stats = store.stats()
    assert stats.evicted > 0 and stats.evicted + stats.tokens == stats.inserted + stats.documents
    for _ in range(2):
        assert contents(store, quiet) == [document(seed).tolist() for seed in range(30)], "far below its share"
        sizes = [sum(len(text) + 1 for text in contents(store, number)) for number in (loud, other)]
        assert min(sizes) > 0.35 * (1 << 14) and sum(sizes) < 0.95 * (1 << 14)
        held = contents(store, loud)
        assert held == [document(seed).tolist() for seed in range(3000 - len(held), 3000)], "the oldest go first"
        store.close()
        store = LiveStore(VOCAB, tmp_path, max_tokens=1 << 15)
    assert (tmp_path / "live" / "learnt.sqlite").stat().st_size < 16 * (1 << 14)
    store.close()


def test_large_documents_are_sorted_in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """131,072 tokens hold the caller for less than a millisecond, also where no further run may be searched."""
    monkeypatch.setattr(runs, "MEMTABLE_TOKENS", 1 << 12)
    static = snapshot_of([[document(1, 300)]] * 6, VOCAB)
    store = LiveStore(VOCAB, isolation="shared", max_tokens=1 << 22, static=static)
    texts = [document(seed, 131_072) for seed in range(4)]
    seconds = []
    for text in texts:
        started = time.perf_counter()
        assert store.insert(text)
        seconds.append(time.perf_counter() - started)
        store.insert(document(7))
    assert min(seconds) < 0.001
    assert store.runs.settle()
    assert sorted(map(len, contents(store))) == [40] * 4 + [131_072] * 4
    assert store.runs.view_of().widest <= SEARCHED and store.stats().tokens == 4 * (131_073 + 41)
    store.close()


def test_a_salt_per_request_does_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "_MANY_TENANTS", 50)
    store = LiveStore(VOCAB, max_tokens=1 << 14)
    first = number_in(store, "salt 0")
    for seed in range(3000):
        store.insert(document(seed), number_in(store, f"salt {seed}"))
        if seed % 10 == 9:
            assert store.runs.settle() and store.stats().tokens <= 1 << 14
            assert seed < 400 or store.stats().tokens > 1 << 13, "all lost their only document at once"
    assert store.stats().tenants < 500
    held = [number_in(store, f"salt {seed}") for seed in range(2900, 3000)]
    assert [contents(store, number) for number in held] == [[document(seed).tolist()] for seed in range(2900, 3000)]
    assert first not in store.runs.tenants and store.runs.view_of(first).table.size == 0
    assert number_in(store, "salt 0") == first and store.insert(document(1), first) and contents(store, first)
    store.close()


def test_a_store_that_is_opened_with_a_lower_bound_goes_on_learning(tmp_path: Path) -> None:
    store = LiveStore(VOCAB, tmp_path, max_tokens=1 << 16)
    assert all(store.insert(document(seed)) for seed in range(1200))
    store.close()
    store = LiveStore(VOCAB, tmp_path, max_tokens=1 << 14)
    assert store.runs.settle() and 1 << 13 < store.stats().tokens <= 1 << 14
    assert store.insert(document(1200)) and contents(store)[-1] == document(1200).tolist()
    store.close()


def test_what_is_no_document_is_left_out(store: LiveStore) -> None:
    assert not store.insert(np.array([], np.int32))
    assert not store.insert(np.array([1, -1, 2], np.int32))
    assert not store.insert(np.array([1, VOCAB], np.int32))
    assert not store.insert(np.ones(1 << 12, np.int32)), "larger than a sixteenth of the bound"
    assert store.stats().tokens == 0 and store.stats().dropped == {"vocabulary": 2, "size": 1}


def test_too_many_static_sub_indices_are_said_and_the_smallest_left_out(caplog: pytest.LogCaptureFixture) -> None:
    parts = [[[100 + i, 200 + i, 300 + i, *[1] * (i % 5)]] for i in range(9)]
    LiveStore(VOCAB, static=snapshot_of(parts[:6], VOCAB)).close()
    assert not caplog.records
    store = LiveStore(VOCAB, static=snapshot_of(parts, VOCAB))
    assert "9 sub-indices" in caplog.text and "smallest 3 are left out" in caplog.text
    assert "datastore merge" in caplog.text
    drafter = Drafter(vocab_size=VOCAB, max_nodes=8, live=store)
    found = [chain(drafter, str(i), [100 + i])[:2] == [200 + i, 300 + i] for i in range(9)]
    assert found == [i not in (0, 5, 6) for i in range(9)]
    store.close()


def test_a_merge_that_fails_stops_learning_only(
    store: LiveStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*inputs):
        raise MemoryError

    monkeypatch.setattr(LearntRuns, "_combined", fail)
    for seed in range(20):
        store.insert(document(seed))
    wait_until(lambda: caplog.records)
    held = contents(store)
    assert not store.insert(document(99))
    assert contents(store) == held == [document(seed).tolist() for seed in range(len(held))]
    assert any("nothing more is learnt" in record.message for record in caplog.records)
