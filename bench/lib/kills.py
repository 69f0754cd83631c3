"""Processes that learn, forget or rewrite a live datastore, killed at random moments: what is in it afterwards."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.demo.measure import Answer, Client
from bench.lib import servers
from bench.lib.prompts import BY_KIND
from freedraft.tenants import tenant_key
from sssd_plugin.datastore.live import exchange, maintenance, runs
from sssd_plugin.datastore.live import store as live_store
from sssd_plugin.datastore.live.exchange import Exchange
from sssd_plugin.datastore.live.log import Log
from sssd_plugin.datastore.live.opening import open_live
from sssd_plugin.datastore.live.store import MAX_TOKENS, LiveStore
from sssd_plugin.datastore.live.tenant import tenant_digest
from sssd_plugin.datastore.records import Erasure, Record, now_ms

VOCAB = 4000
Work = Callable[[str, Path, int], None]
TENANTS = str(tenant_key("even")), str(tenant_key("odd"))
PERIOD = 0.1
"""Seconds between looks at a URL while processes are killed, so that a second has many of them."""
COPY = np.array([901] * 4, "<i4").tobytes()
"""Of each document of the tenant that is forgotten."""


def text_of(number: int) -> list[int]:
    """Two ids that only this document has side by side, and then those of its tenant."""
    return [number // 600, 300 + number % 600, *([900 + number % 2] * (4 + number % 50))]


def open_store(place: str, work: Work) -> LiveStore:
    """What learns in a folder drops the oldest documents meanwhile."""
    return open_live(place, VOCAB, max_tokens=1 << 15 if work is learn and "://" not in place else MAX_TOKENS)


def log_of(place: str) -> Log | Exchange:
    return Exchange(place, VOCAB) if "://" in place else Log.open(Path(place), VOCAB, 1 << 24, None, "strict")


def documents_in(place: str) -> list[Record]:
    """In a folder oldest first."""
    log = log_of(place)
    found = log.documents() if isinstance(log, Exchange) else log.load()
    log.close()
    return found


def insert(store: LiveStore, number: int) -> None:
    while not store.insert(np.array(text_of(number), np.int32), store.tenant(TENANTS[number % 2])):
        time.sleep(0.001)


def learn(place: str, progress: Path, first: int) -> None:
    """Learn as a server does, and write down when each document was learnt."""
    store, burst = open_store(place, learn), 1 if "://" in place else 10
    store.flush()
    with progress.open("a", buffering=1) as out:
        for number in range(first, 600 * VOCAB):
            insert(store, number)
            out.write(f"{number} {time.time()}\n")
            if number % burst == 0:
                time.sleep(0.002)


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


WORKS: dict[str, Work] = {"learning": learn, "forgetting": forget, "exchanging": learn, "compacting": compact}


def _run(work: Work, place: str, progress: Path, first: int) -> None:
    progress.write_text("begun\n")
    work(place, progress, first)


def kills(name: str, times: int, *, url: bool = False) -> dict[str, Any]:
    """Kill a process so often: what it left is what there was and what it learnt, or that without one tenant's. Work
    "exchanging" learns at a URL, at which another server looks meanwhile, and finishes an erasure that was begun."""
    exchange.POLL_SECONDS, exchange.FINISH_SECONDS = PERIOD, 2 * PERIOD
    live_store.SYNC_SECONDS, runs.MEMTABLE_TOKENS = PERIOD / 5, 256
    work, rng, row = WORKS[name], np.random.default_rng(), Counter[str](ended_before_the_kill=0)
    longest = 1.2 if work is learn else 0.5 if url else 0.06
    kept, first, oldest = set[int](), 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FREEDRAFT_CACHE"] = f"{folder}/cache"
        place, progress = f"file://{folder}/bucket" if url else f"{folder}/store", Path(folder, "progress")
        for _ in range(times):
            progress.write_text("")
            server = open_store(place, work)
            server.flush()
            for number in range(first, first + 40):
                insert(server, number)
            kept |= set(range(first, first := first + 40))
            server.flush()
            odd = tenant_digest(server.key or b"", TENANTS[1])
            if not url:
                server.close()
            elif name == "exchanging":
                Exchange(place, VOCAB)._announce([Erasure(odd, now_ms() + 1)])
                time.sleep(0.01)  # what is learnt now stays
            process = multiprocessing.get_context("fork").Process(target=_run, args=(work, place, progress, first))
            process.start()
            while not progress.read_text():
                time.sleep(0.0002)
            time.sleep(float(rng.random()) * longest)
            killed = time.time()
            process.kill()
            process.join()
            lines = progress.read_text().split("\n")[1:-1]
            if url:
                time.sleep(8 * PERIOD)  # the server finishes what was begun
                server.close()
            found = documents_in(place)
            texts = {600 * int(d.tokens[0]) + int(d.tokens[1]) - 300: d for d in found}
            done = lines == ["done"]
            learnt = {int(n): float(at) for n, at in (line.split() for line in lines if not done)}
            oldest_of = [min((n for n in texts if n % 2 == which), default=0) for which in (0, 1)]
            if work is learn and not url:  # which drops the oldest of each tenant
                kept = {n for n in kept if n >= oldest_of[n % 2]}
            left = any(n % 2 for n in texts if n < first)
            if name == "exchanging" or (work is forget and (done or not left)):
                row["erasures_that_came_back"] += left
                files = (path for path in Path(folder).rglob("*") if path.is_file() and work is forget)
                row["erasures_that_left_copies"] += any(COPY in path.read_bytes() for path in files)
                kept = {n for n in kept if n % 2 == 0}
            new = [n for n in texts if n >= first]
            kept |= set(new)
            expected = {n for n in range(first, max(new, default=0) + 1) if n >= oldest_of[n % 2]}
            wrong = any(d.tokens.tolist() != text_of(n) or (d.tenant == odd) != n % 2 for n, d in texts.items())
            wrong |= len(found) > len(texts) or (not url and new != sorted(expected))
            missing = [at for n, at in learnt.items() if n not in texts and n > oldest_of[n % 2]]
            oldest = max([oldest, *(killed - at for at in missing)])
            first = max([first, *(n + 1 for n in (*texts, *learnt))])
            row["ended_before_the_kill"] += done
            row["restarts_with_wrong_data"] += wrong or set(texts) != kept
    return {"kills": times, "documents": first, **row, "oldest_lost_ms": round(oldest * 1e3, 1)}


def engine_kills(model: Path, times: int) -> dict[str, Any]:
    """vLLM's server, killed with all its processes while it answers."""
    texts, rng = BY_KIND[::2], np.random.default_rng()
    speculative: dict[str, object] = {"method": "sssd", "num_speculative_tokens": 6, "policy": "fixed"}

    @contextlib.contextmanager
    def serving(speculative: dict[str, object] | None) -> Any:
        server = servers.build("s", "vllm", model, folder / "log", speculative=speculative)
        with servers.running(server):
            yield server, Client("vllm", server, 32)

    def ask_on(client: Client) -> list[Answer]:
        with contextlib.suppress(Exception):  # its server was killed
            return [client.ask(text) for text in texts]
        return []

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        speculative |= {"live": True, "isolation": "shared", "datastore": str(folder / "store")}
        with serving(None) as (_, client):
            plain = [client.ask(text).tokens for text in texts]
        ended: list[float] = []  # when each answer was there
        differ = wrong = lost = 0
        for round_ in range(times + 1):
            with serving(speculative) as (server, client):
                for text, expected in zip(texts, plain, strict=True):
                    differ += client.ask(text).tokens != expected
                    ended.append(time.time())
                if round_ == times:
                    break
                asking = threading.Thread(target=ask_on, args=(client,), daemon=True)
                asking.start()
                time.sleep(float(rng.random()) * 3.0)
                killed = time.time()
                os.killpg(server.process.pid, signal.SIGKILL)
            asking.join()
            log = Log.open(folder / "store", 1 << 30, 1 << 24, None, "shared")
            documents = [tuple(record.tokens.tolist()) for record in log.load()]
            log.close()
            wrong += sum(document not in plain for document in documents)
            lost += len(documents) < sum(moment < killed - 1.0 for moment in ended)
    row = {"kills": times, "answers": len(ended), "answers_that_differ_from_plain": differ}
    return row | {"documents_with_wrong_data": wrong, "restarts_that_lost_what_was_older_than_1_s": lost}
