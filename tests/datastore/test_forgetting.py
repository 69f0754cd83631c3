"""What is erased is gone: from the disk, from memory, in every process that learns there, and whatever happens."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from freedraft.step import TOP_TOKENS, NodeLogits
from freedraft.tenants import tenant_number
from sssd_plugin.datastore.errors import DatastoreError
from sssd_plugin.datastore.live import log as log_module
from sssd_plugin.datastore.live import runs
from sssd_plugin.datastore.live import store as live_store
from sssd_plugin.datastore.live.folder import LiveManifest
from sssd_plugin.datastore.live.maintenance import forget, verify_live
from sssd_plugin.datastore.live.store import LiveStore
from sssd_plugin.datastore.records import Erasure
from sssd_plugin.drafter import Drafter
from tests.support.stores import documents_of, number_in
from tests.support.waiting import wait_until

VOCAB = 100_000


def marker(tenant: int, number: int) -> np.ndarray:
    """Text whose every token says whose it is: no two of them stand in another tenant's."""
    n = 1 + (37 * number) % 400
    return (1000 * (tenant + 1) + np.random.default_rng([tenant, number]).integers(0, 1000, n)).astype(np.int32)


def teach(store: LiveStore, tenants: int, documents: int, first: int = 0) -> None:
    for number in range(first, first + documents):
        for tenant in range(tenants):
            while not store.insert(marker(tenant, number), number_in(store, f"salt {tenant}")):
                time.sleep(0.001)


def left_on_disk(directory: Path, tenant: int) -> int:
    """Places in the folder where two neighbouring tokens of the tenant stand."""
    found = 0
    for path in (directory / "live").iterdir():
        content = path.read_bytes()
        for shift in range(4):
            part = content[shift : shift + (len(content) - shift) // 4 * 4]
            mine = np.frombuffer(part, "<i4") // 1000 == tenant + 1
            found += int((mine[1:] & mine[:-1]).sum())
    return found


def number_of(directory: Path, tenant: int) -> bytes:
    """As it stands in a file."""
    manifest = LiveManifest.of(directory / "live")
    assert manifest is not None
    return tenant_number(bytes.fromhex(manifest.key), f"salt {tenant}").to_bytes(8, "big").lstrip(b"\0")


def held(store: LiveStore, tenant: int) -> list[list[int]]:
    """What is in memory of a tenant, drafted from or not."""
    texts = [text for one in store.runs.tenants.values() for run in one.all_runs for text in documents_of(run.sub)]
    return [text for text in texts if text[0] // 1000 == tenant + 1]


@pytest.mark.parametrize("isolation", ["salt", "strict", "shared"])
def test_nothing_is_left_of_a_tenant_on_disk(tmp_path: Path, isolation: str) -> None:
    store = LiveStore(VOCAB, tmp_path, isolation=isolation)  # type: ignore[arg-type]
    teach(store, 4, 120)
    store.close()
    assert left_on_disk(tmp_path, 1) > 1000, "the test can see it"
    for tenant in (1, 3):  # in two rounds: the first moves rows about
        gone = forget(tmp_path, [f"salt {tenant}"])
        assert gone.startswith("120 documents, ") and "servers" not in gone
        assert left_on_disk(tmp_path, tenant) == 0
        content = b"".join(path.read_bytes() for path in (tmp_path / "live").glob("learnt*"))
        assert number_of(tmp_path, tenant) not in content
        assert verify_live(tmp_path, [f"salt {tenant}"]) is not None
    with pytest.raises(DatastoreError, match="still names this tenant"):
        verify_live(tmp_path, ["salt 2"])
    store = LiveStore(VOCAB, tmp_path, isolation=isolation)  # type: ignore[arg-type]
    assert [len(held(store, tenant)) for tenant in range(4)] == [120, 0, 120, 0]
    store.close()


def test_a_running_server_forgets_within_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MEMTABLE_TOKENS", 256)
    monkeypatch.setattr(log_module, "ANNOUNCED_SECONDS", 2.0)
    servers = [LiveStore(VOCAB, tmp_path) for _ in range(2)]
    drafters = [Drafter(vocab_size=VOCAB, max_nodes=8, live=store) for store in servers]
    teach(servers[0], 3, 60)
    teach(servers[1], 3, 60, first=60)
    wait_until(lambda: all(store.stats().documents == 360 for store in servers), 10)
    servers[0].insert(marker(1, 999), number_in(servers[0], "salt 1"))  # not on disk yet

    def drafts(store: LiveStore, drafter: Drafter, tenant: int) -> bool:
        found = False
        for number in (3, 63, 119):
            drafter.set_tenant("x", number_in(store, f"salt {tenant}"))
            drafter.replace("x", marker(tenant, number)[:4])
            found |= int(drafter.draft(["x"], max_nodes=8).counts[0]) > 1
            drafter.finish(["x"])
        return found

    assert all(drafts(*pair, tenant) for pair in zip(servers, drafters, strict=True) for tenant in range(3))
    gone = forget(tmp_path, ["salt 1"])
    assert gone.startswith(("120 documents, ", "121 documents, ")) and gone.endswith("within a second")
    took = wait_until(lambda: not any(drafts(*pair, 1) for pair in zip(servers, drafters, strict=True)), 1)
    assert took < 1.0
    wait_until(lambda: not any(held(store, 1) for store in servers), 1)
    assert all(drafts(*pair, tenant) for pair in zip(servers, drafters, strict=True) for tenant in (0, 2))
    assert all(store.runs.settle() for store in servers)
    wait_until(lambda: number_of(tmp_path, 1) not in (tmp_path / "live" / "learnt.sqlite").read_bytes(), 10)
    assert left_on_disk(tmp_path, 1) == 0
    teach(servers[0], 2, 1, first=500)  # what comes later is learnt anew
    assert len(held(servers[0], 1)) == 1
    for store in servers:
        store.close()
    again = LiveStore(VOCAB, tmp_path)
    assert [len(held(again, tenant)) for tenant in range(3)] == [121, 1, 120]
    again.close()


def test_what_is_being_merged_sorted_or_written_is_forgotten_too(tmp_path: Path, monkeypatch) -> None:
    """Erasures at every moment of a store that learns, shared by all, large documents among them."""
    monkeypatch.setattr(runs, "MEMTABLE_TOKENS", 128)
    monkeypatch.setattr(runs, "LARGE_TOKENS", 200)
    store = LiveStore(VOCAB, tmp_path, isolation="shared")
    for round_ in range(25):
        teach(store, 3, 8, first=8 * round_)
        store.erase(Erasure(number_in(store, "salt 1")))
        view = store.runs.view_of()
        seen = [text for run in view.keeps[1:] for text in documents_of(run.sub)]
        assert not any(text[0] // 1000 == 2 for text in seen)
    assert store.runs.settle()
    assert [len(held(store, tenant)) for tenant in range(3)] == [200, 0, 200]
    assert store.stats().tokens == sum(len(text) + 1 for tenant in range(3) for text in held(store, tenant))
    store.close()


def test_a_server_that_slept_through_an_erasure_takes_what_the_file_holds(tmp_path: Path) -> None:
    store = LiveStore(VOCAB, tmp_path)
    teach(store, 2, 5)
    store.flush()
    store._stop.set()
    store._keeper.join()
    forget(tmp_path, ["salt 1"])
    other = LiveStore(VOCAB, tmp_path)
    other._log.file.db.execute("DELETE FROM erasures")
    teach(other, 2, 1, first=7)
    other.close()
    store.flush()
    assert store.runs.settle() and [len(held(store, tenant)) for tenant in range(2)] == [6, 1]
    store.close()


def test_recycled_logits_are_forgotten_too() -> None:
    store = LiveStore(VOCAB)
    drafter = Drafter(vocab_size=VOCAB, max_nodes=4, live=store, recycle_megabytes=1)
    drafter.set_tenant("x", number_in(store, "salt 1"))
    drafter.replace("x", np.array([1, 2, 3], np.int32))
    tree = drafter.draft(["x"], max_nodes=4)
    top = np.arange(4 * TOP_TOKENS, dtype=np.int32).reshape(1, 4, TOP_TOKENS)
    drafter.recycle(NodeLogits(["x"], tree, top, np.full(top.shape, -1.0, np.float32)))
    assert (drafter._entries["key"] != 0).any()
    store.erase(Erasure(number_in(store, "salt 1")))
    assert not drafter._entries["key"].any() and not drafter._entries["tokens"].any()
    drafter.close()


class Wall:
    """The clock of a host, which somebody sets."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seconds = 1e9
        monkeypatch.setattr(live_store, "now_ms", lambda: int(self.seconds * 1000))


def test_no_text_grows_older_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wall = Wall(monkeypatch)
    for directory in (None, tmp_path):
        store = LiveStore(VOCAB, directory, max_age=100.0)
        for number in range(20):
            teach(store, 2, 1, first=number)
            wall.seconds += 10.0
            store.flush()
            store._expire()
        assert store.runs.settle()
        assert [len(held(store, tenant)) for tenant in range(2)] == [10, 10]
        store.close()
    assert verify_live(tmp_path) == "20 documents were learnt and are whole"


def test_time_never_runs_backwards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that is set back makes no text older, and none that comes older than what is there."""
    wall = Wall(monkeypatch)
    store = LiveStore(VOCAB, max_age=100.0)
    teach(store, 1, 1)
    wall.seconds -= 1e6
    teach(store, 1, 1, first=1)
    times = store.runs.tenants[number_in(store, "salt 0")].all_runs[0].documents[:, 0]
    assert times[0] == times[1] == 1e12
    wall.seconds += 1e6 + 104.0
    store._expire()
    assert store.runs.settle() and held(store, 0) == []
    store.close()


def damage(directory: Path, part: str) -> None:
    """Damage a document of the second tenant, the page that holds it, or the file."""
    path = directory / "live" / "learnt.sqlite"
    content = bytearray(path.read_bytes())
    at, number = content.index(marker(1, 30).tobytes()), number_of(directory, 1)
    row = content.rindex(number, 0, at)  # tenant, time, checksum, tokens
    if part in ("tokens", "tenant", "time"):
        content[{"tokens": at, "tenant": row, "time": row + len(number) + 2}[part] + 1] ^= 4
    elif part in ("page", "read page"):
        content[at // 4096 * 4096 : (at // 4096 + 1) * 4096] = os.urandom(4096)
    elif part == "schema":
        content[100:4096] = os.urandom(3996)
    else:
        content[:100] = os.urandom(100)
    path.unlink() if part == "gone" else path.write_bytes(content)


@pytest.mark.parametrize("part", ["tokens", "tenant", "time", "page", "read page", "not a database", "schema", "gone"])
def test_forgetting_with_damaged_data(tmp_path: Path, part: str, caplog: pytest.LogCaptureFixture) -> None:
    """Which costs one document, or those on a page, after which the file is sound again; erased is all of it."""

    def counts() -> list[int]:
        store = LiveStore(VOCAB, tmp_path)
        found = [len(held(store, tenant)) for tenant in range(3)]
        store.close()
        return found

    store = LiveStore(VOCAB, tmp_path)
    teach(store, 3, 60)
    store.close()
    damage(tmp_path, part)
    before = (tmp_path / "live" / "learnt.sqlite").read_bytes() if part != "gone" else b""
    if part == "read page":
        kept = counts()
        assert min(kept) >= 50 and sum(kept) < 180 and "was damaged" in caplog.text
        caplog.clear()
        assert counts() == kept and "damaged" not in caplog.text
    elif part in ("tokens", "tenant", "time"):
        assert counts() == [60, 59, 60] and "damaged and left out" in caplog.text
        assert (tmp_path / "live" / "learnt.sqlite").read_bytes() == before, "nothing that is stored is thrown away"
    forget(tmp_path, ["salt 1"])
    assert left_on_disk(tmp_path, 1) == 0, "also what could not be read"
    assert verify_live(tmp_path, ["salt 1"]) is not None
    left = counts()
    assert left[1] == 0 and (part in ("not a database", "schema", "gone") or min(left[0], left[2]) >= 50)
