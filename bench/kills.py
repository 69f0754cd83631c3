"""Processes that learn, forget or rewrite a live datastore, killed at random moments: what is in it afterwards.

    python bench/kills.py folder --json OUT          # or: url, the URL of a folder, at which another server looks

"exchanging" learns at a URL and finishes an erasure that was begun. Text is wrong where it was never learnt, is missing
although it was confirmed, or came back after its erasure.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.lib.results import write_json
from freedraft.tenants import tenant_key
from sssd_plugin.datastore.live import exchange, maintenance
from sssd_plugin.datastore.live import store as live_store
from sssd_plugin.datastore.live.exchange import Exchange
from sssd_plugin.datastore.live.log import Log
from sssd_plugin.datastore.live.opening import open_live
from sssd_plugin.datastore.live.store import LiveStore
from sssd_plugin.datastore.live.tenant import tenant_digest
from sssd_plugin.datastore.records import Erasure, Record, now_ms

VOCAB = 4000
TENANTS = str(tenant_key("even")), str(tenant_key("odd"))
TAUGHT = 40  # documents of a round that are stored before the killed process starts
# Seconds between looks at a URL while processes are killed, so that a second has many of them.
PERIOD = 0.1
# Stands in each document of the tenant that is forgotten.
COPY = np.array([901] * 4, "<i4").tobytes()


def text_of(number: int) -> list[int]:
    """Two ids that only this document has side by side, and then those of its tenant."""
    return [number // 600, 300 + number % 600, *([900 + number % 2] * (4 + number % 50))]


def log_of(place: str) -> Log | Exchange:
    return Exchange(place, VOCAB) if "://" in place else Log.open(Path(place), VOCAB, 1 << 24, None, "salt")


def documents_in(place: str) -> list[Record]:
    log = log_of(place)
    found = log.documents() if isinstance(log, Exchange) else log.load()
    log.close()
    return found


def insert(store: LiveStore, number: int) -> None:
    while not store.insert(np.array(text_of(number), np.int32), store.tenant(TENANTS[number % 2])):
        time.sleep(0.001)


def learn(place: str, progress: Path, first: int) -> None:
    """Learn as a server does, and write down when each document was learnt."""
    store = open_live(place, VOCAB)
    store.flush()
    with progress.open("a", buffering=1) as out:
        for number in range(first, 600 * VOCAB):
            insert(store, number)
            out.write(f"{number} {time.time()}\n")
            time.sleep(0.002 if "://" in place else 0.0002)


def forget(place: str, progress: Path, first: int) -> None:
    if "://" in place:
        maintenance.forget_at(place, [TENANTS[1]])
    else:
        maintenance.forget(Path(place), [TENANTS[1]])
    with progress.open("a") as out:
        out.write("done\n")


def compact(place: str, progress: Path, first: int) -> None:
    log = log_of(place)
    assert isinstance(log, Log)
    while True:
        log.compact()


WORKS: dict[str, Callable[[str, Path, int], None]] = {
    "learning": learn, "forgetting": forget, "exchanging": learn, "compacting": compact
}  # fmt: skip
OF_PLACE = {"folder": ("learning", "forgetting", "compacting"), "url": ("learning", "forgetting", "exchanging")}


def run_and_kill(name: str, place: str, progress: Path, first: int) -> tuple[float, dict[int, float], bool]:
    """Run a work in a process and kill it: when that was, when which documents were learnt, whether it was done."""
    work = WORKS[name]
    progress.write_text("")
    process = multiprocessing.get_context("fork").Process(target=begin, args=(work, place, progress, first))
    process.start()
    while not progress.read_text():
        time.sleep(0.0002)
    longest = 1.2 if work is learn else 0.5 if "://" in place else 0.06
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


def kills(name: str, times: int, *, url: bool = False) -> dict[str, Any]:
    """Kill a process `times` times: it leaves what there was and what it learnt, or that without one tenant's."""
    exchange.POLL_SECONDS, exchange.FINISH_SECONDS = PERIOD, 2 * PERIOD
    live_store.SYNC_SECONDS, live_store.MEMTABLE_TOKENS = PERIOD / 5, 256
    row, kept, first, oldest = Counter[str](ended_before_the_kill=0), set[int](), 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FREEDRAFT_CACHE"] = f"{folder}/cache"
        place = f"file://{folder}/bucket" if url else f"{folder}/store"
        for _ in range(times):
            server, taught = open_live(place, VOCAB), range(first, first + TAUGHT)
            for number in taught:
                insert(server, number)
            server.flush()
            kept, first = kept | set(taught), taught.stop
            odd = tenant_digest(server.key or b"", TENANTS[1])
            if not url:
                server.close()
            elif name == "exchanging":
                Exchange(place, VOCAB)._announce([Erasure(odd, now_ms() + 1)])
                time.sleep(0.01)  # what is learnt now stays
            killed, learnt, done = run_and_kill(name, place, Path(folder, "progress"), first)
            if url:
                time.sleep(8 * PERIOD)  # the server finishes what was begun
                server.close()
            found = documents_in(place)
            texts = {600 * int(d.tokens[0]) + int(d.tokens[1]) - 300: d for d in found}
            left = any(n % 2 for n in texts if n < first)
            if name == "exchanging" or (name == "forgetting" and (done or not left)):
                row["erasures_that_came_back"] += left
                files = (path for path in Path(folder).rglob("*") if path.is_file() and name == "forgetting")
                row["erasures_that_left_copies"] += any(COPY in path.read_bytes() for path in files)
                kept = {n for n in kept if n % 2 == 0}
            new = [n for n in texts if n >= first]
            wrong = any(d.tokens.tolist() != text_of(n) or (d.tenant == odd) != n % 2 for n, d in texts.items())
            wrong |= len(found) > len(texts) or (not url and sorted(new) != list(range(first, first + len(new))))
            kept |= set(new)
            row["restarts_with_wrong_data"] += wrong or set(texts) != kept
            row["ended_before_the_kill"] += done
            oldest = max([oldest, *(killed - at for n, at in learnt.items() if n not in texts)])
            first = max([first, *(n + 1 for n in (*texts, *learnt))])
    return {"kills": times, "documents": first, **row, "oldest_lost_ms": round(oldest * 1e3, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("place", choices=tuple(OF_PLACE))
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    works = OF_PLACE[args.place]
    figures = {f"kills_while_{name}": kills(name, args.times, url=args.place == "url") for name in works}
    print(json.dumps(figures, indent=1))
    write_json(args.json, figures | {"period_seconds": PERIOD})


if __name__ == "__main__":
    main()
