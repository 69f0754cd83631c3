"""Processes that learn, forget or rewrite a live datastore, killed at random moments: what is in it afterwards.

At the URL of a folder another server looks meanwhile; "exchanging" learns there and finishes an erasure.
"""

import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from freedraft.tenants import tenant_key
from sssd_plugin.datastore.live import exchange, maintenance
from sssd_plugin.datastore.live import runs as live_runs
from sssd_plugin.datastore.live import store as live_store
from sssd_plugin.datastore.live.exchange import Exchange
from sssd_plugin.datastore.live.folder import LiveManifest
from sssd_plugin.datastore.live.log import Log
from sssd_plugin.datastore.live.store import LiveStore
from sssd_plugin.datastore.records import Erasure, Record, now_ms
from tests.support.stores import number_in

VOCAB = 4000
TENANTS = str(tenant_key("even")), str(tenant_key("odd"))
TAUGHT = 40  # documents of a round that are stored before the killed process starts
ROOM = 1 << 13  # tokens, of a store that overflows
# What was learnt longer ago than this before a kill must be there.
LOST_SECONDS = 2.0
# Seconds between looks at a URL while processes are killed, so that a second has many of them.
PERIOD = 0.1
# Stands in each document of the tenant that is forgotten.
COPY = np.array([901] * 4, "<i4").tobytes()


def text_of(number: int) -> list[int]:
    """Two ids that only this document has side by side, and then those of its tenant."""
    return [number // 600, 300 + number % 600, *([900 + number % 2] * (4 + number % 50))]


def log_of(place: str) -> Log | Exchange:
    server = LiveManifest(vocab_size=VOCAB, isolation="salt")
    return Exchange(place, server) if "://" in place else Log.open(Path(place), server, 1 << 24)


def documents_in(place: str) -> list[Record]:
    log = log_of(place)
    if isinstance(log, Exchange):
        return log.documents()
    found = log.load()
    log.close()
    return found


def insert(store: LiveStore, number: int) -> None:
    while not store.insert(np.array(text_of(number), np.int32), number_in(store, TENANTS[number % 2])):
        time.sleep(0.001)


def learn(place: str, progress: Path, first: int) -> None:
    """Learn as a server does, and write down when each document was learnt."""
    store = LiveStore(VOCAB, place)
    store.flush()
    with progress.open("a", buffering=1) as out:
        for number in range(first, 600 * VOCAB):
            insert(store, number)
            out.write(f"{number} {time.time()}\n")
            time.sleep(0.002 if "://" in place else 0.0002)


def overflow(place: str, progress: Path, first: int) -> None:
    """Learn more than there is room for, and write down what was flushed: as if long ago, so that it must be there."""
    store = LiveStore(VOCAB, place, max_tokens=ROOM)
    with progress.open("a", buffering=1) as out:
        for number in range(first, 600 * VOCAB):
            insert(store, number)
            if number % 20 == 0:
                store.flush()
                out.write(f"{number} 0\n")


def forget(place: str, progress: Path, first: int) -> None:
    maintenance.forget(place, [TENANTS[1]])
    with progress.open("a") as out:
        out.write("done\n")


def compact(place: str, progress: Path, first: int) -> None:
    log = log_of(place)
    assert isinstance(log, Log)
    while True:
        log.file.compact()


WORKS: dict[str, Callable[[str, Path, int], None]] = {
    "learning": learn, "overflowing": overflow, "forgetting": forget, "exchanging": learn, "compacting": compact
}  # fmt: skip
FEW, MANY = 8, 16  # kills, in `make test` and in `make test-all`
OF_FOLDER = ("learning", "overflowing", "forgetting", "compacting")
CASES = [
    *(("folder", name) for name in OF_FOLDER),
    *(("url", name) for name in ("learning", "forgetting", "exchanging")),
]


def run_and_kill(name: str, place: str, progress: Path, first: int) -> tuple[float, dict[int, float], bool]:
    """Run a work in a process and kill it: when that was, when which documents were learnt, whether it was done."""
    work = WORKS[name]
    progress.write_text("")
    process = multiprocessing.get_context("fork").Process(target=begin, args=(work, place, progress, first))
    process.start()
    while not progress.read_text():
        time.sleep(0.0002)
    longest = 1.2 if work is learn else 0.5 if "://" in place else 0.25 if work is overflow else 0.06
    time.sleep(float(np.random.default_rng().random()) * longest)
    killed = time.time()
    process.kill()
    process.join()
    lines = progress.read_text().split("\n")[1:-1]
    done = lines == ["done"]
    return killed, {int(n): float(at) for n, at in (line.split() for line in lines if not done)}, done


def begin(work: Callable[[str, Path, int], None], place: str, progress: Path, first: int) -> None:
    progress.write_text("begun\n")
    work(place, progress, first)


@pytest.mark.parametrize(
    ("where", "name", "kills"),
    [
        ("folder", "forgetting", FEW),
        ("folder", "overflowing", FEW),
        *(pytest.param(*case, MANY, marks=pytest.mark.extended) for case in CASES),
    ],
)
def test_kills_of_processes_that_learn_and_forget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, name: str, kills: int
) -> None:
    """What is there afterwards is what there was and what was learnt, or that without one tenant's text."""
    monkeypatch.setattr(exchange, "POLL_SECONDS", PERIOD)
    monkeypatch.setattr(exchange, "FINISH_SECONDS", 2 * PERIOD)
    monkeypatch.setattr(live_store, "SYNC_SECONDS", PERIOD / 5)
    monkeypatch.setattr(live_runs, "MEMTABLE_TOKENS", 256)
    monkeypatch.setenv("FREEDRAFT_CACHE", str(tmp_path / "cache"))
    url = where == "url"
    place = f"file://{tmp_path}/bucket" if url else f"{tmp_path}/store"
    kept, first, oldest = set[int](), 0, [0, 0]
    room = {"max_tokens": ROOM} if name == "overflowing" else {}
    for _ in range(kills):
        server, taught = LiveStore(VOCAB, place, **room), range(first, first + TAUGHT)
        for number in taught:
            insert(server, number)
        server.flush()
        kept, first = kept | set(taught), taught.stop
        odd = number_in(server, TENANTS[1])
        if not url:
            server.close()
        elif name == "exchanging":
            Exchange(place, LiveManifest(vocab_size=VOCAB, isolation="salt"))._announce([Erasure(odd, now_ms() + 1)])
            time.sleep(0.01)  # what is learnt now stays
        killed, learnt, done = run_and_kill(name, place, tmp_path / "progress", first)
        if url:
            time.sleep(8 * PERIOD)  # the server finishes what was begun
            server.close()
        found = documents_in(place)
        texts = {600 * int(d.tokens[0]) + int(d.tokens[1]) - 300: d for d in found}
        assert len(texts) == len(found), "a document is there twice"
        for number, document in texts.items():
            assert document.tokens.tolist() == text_of(number) and (document.tenant == odd) == number % 2
        left = any(n % 2 for n in texts if n < first)
        if name == "exchanging" or (name == "forgetting" and (done or not left)):
            assert not left, "an erasure came back"
            kept = {n for n in kept if n % 2 == 0}
        if name == "forgetting" and (done or not left):
            files = (path for path in tmp_path.rglob("*") if path.is_file())
            assert not any(COPY in path.read_bytes() for path in files), "an erasure left a copy"
        if room:  # each tenant's oldest documents went, an eighth of what fits at a time
            assert sum(len(document.tokens) + 1 for document in found) <= ROOM + ROOM // 8
            oldest = [min(n for n in texts if n % 2 == tenant) for tenant in range(2)]
            kept = {n for n in kept if n >= oldest[n % 2]}
        new = sorted(n for n in texts if n >= first)
        whole = [n for n in range(first, max([*new, -1]) + 1) if n >= oldest[n % 2]]
        assert url or new == whole, "a document is missing before others"
        kept |= set(new)
        assert set(texts) == kept
        assert all(killed - at < LOST_SECONDS for n, at in learnt.items() if n not in texts and n >= oldest[n % 2])
        first = max([first, *(n + 1 for n in (*texts, *learnt))])
    assert not room or min(oldest) > 0, "nothing was dropped"
