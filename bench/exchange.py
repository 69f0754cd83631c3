"""Servers that learn from each other at one URL: over HTTP, and killed at random moments.

    python bench/exchange.py --json OUT [--engines vllm vllm] [--pythons PYTHON PYTHON] | --kills 100

Two servers with the demo model, a core each, and an S3-compatible bucket (moto). A client with a salt asks the first
one, and `--wait` seconds later the other one: tokens per step. Then the tenant is forgotten, and both are asked again.
Clients without a salt, and with other ones, ask the same, and must not be drafted for from that answer.

With `--kills`: a process that learns, that forgets a tenant, or that learns and finishes an erasure that was begun, is
killed so often beside a server. Then the URL holds what was learnt, no other text, and nothing that was erased.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.lib import servers
from bench.lib.results import earlier_figures, write_json
from bench.lib.servers import HOST, free_port
from freedraft.tenants import tenant_key
from sssd_plugin.datastore.live import exchange, maintenance
from sssd_plugin.datastore.live import store as live_store
from sssd_plugin.datastore.live.exchange import Exchange
from sssd_plugin.datastore.live.opening import open_live
from sssd_plugin.datastore.live.store import LiveStore
from sssd_plugin.datastore.live.tenant import tenant_digest
from sssd_plugin.datastore.records import Erasure, now_ms

QUESTION = "Once upon a time, in a village by the sea, there lived"
TOKENS = 60
NAMES = str(tenant_key("even")), str(tenant_key("odd"))
PERIOD = 0.1
"""Seconds between looks at the URL while processes are killed, so that a second has many of them."""


def text_of(number: int) -> list[int]:
    """Two ids that only this document has side by side, and then those of its tenant."""
    return [number // 600, 300 + number % 600, *([900 + number % 2] * (4 + number % 50))]


def insert(server: LiveStore, number: int) -> None:
    while not server.insert(np.array(text_of(number), np.int32), server.tenant(NAMES[number % 2])):
        time.sleep(0.001)


def learn(url: str, progress: Path, first: int) -> None:
    """Learn as a server does, and write down when each document was learnt."""
    server = open_live(url, 1000)
    server.flush()
    with progress.open("w", buffering=1) as out:
        for number in range(first, 1 << 30):
            insert(server, number)
            out.write(f"{number} {time.time()}\n")
            time.sleep(0.002)


def forget(url: str, progress: Path, first: int) -> None:
    maintenance.forget_at(url, [NAMES[1]])
    progress.write_text("done")


def kills_of(name: str, times: int) -> dict[str, Any]:
    work = forget if name == "forgetting" else learn
    rng, row = np.random.default_rng(), Counter[str](ended_before_the_kill=0)
    kept, first, oldest, copies = set[int](), 0, 0.0, np.array([901] * 4, "<i4").tobytes()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FREEDRAFT_CACHE"] = f"{folder}/cache"
        url, progress = f"file://{folder}/bucket", Path(folder, "progress")
        for _ in range(times):
            progress.write_text("")
            server = open_live(url, 1000)
            server.flush()
            for number in range(first, first + 40):
                insert(server, number)
            kept |= set(range(first, first := first + 40))
            server.flush()
            odd = tenant_digest(server.key or b"", NAMES[1])
            if name == "exchanging":
                Exchange(url, 1000)._announce([Erasure(odd, now_ms() + 1)])
                time.sleep(0.01)  # what is learnt now stays
            process = multiprocessing.get_context("fork").Process(target=work, args=(url, progress, first))
            process.start()
            time.sleep(0.02 + float(rng.random()) * (0.5 if work is forget else 1.2))
            killed = time.time()
            process.kill()
            process.join()
            lines = progress.read_text().split("\n")
            time.sleep(8 * PERIOD)  # the server finishes what was begun
            server.close()
            texts = {600 * int(d.tokens[0]) + int(d.tokens[1]) - 300: d for d in Exchange(url, 1000).documents()}
            wrong = any(d.tokens.tolist() != text_of(n) or (d.tenant == odd) != n % 2 for n, d in texts.items())
            learnt = {int(n): float(at) for n, at in (line.split() for line in lines[:-1])}
            missing = [at for n, at in learnt.items() if n not in texts]
            oldest = max([oldest, *(killed - at for at in missing)])
            left = any(n % 2 for n in texts if n < first)
            if name == "exchanging" or (work is forget and (lines == ["done"] or not left)):
                row["erasures_that_came_back"] += left
                files = (path for path in Path(folder).rglob("*") if path.is_file() and work is forget)
                row["erasures_that_left_copies"] += any(copies in path.read_bytes() for path in files)
                kept = {n for n in kept if n % 2 == 0}
            kept |= {n for n in texts if n >= first}
            first = max([first, *(n + 1 for n in (*texts, *learnt))])
            row["ended_before_the_kill"] += lines == ["done"]
            row["restarts_with_wrong_data"] += wrong or set(texts) != kept
    return {"kills": times, "documents": first, **row, "oldest_lost_ms": round(oldest * 1e3, 1)}


def kills(times: int) -> dict[str, Any]:
    exchange.POLL_SECONDS, exchange.FINISH_SECONDS, live_store.SYNC_SECONDS = PERIOD, 2 * PERIOD, PERIOD / 5
    works = ("learning", "forgetting", "exchanging")
    return {"period_seconds": PERIOD} | {f"kills_while_{name}": kills_of(name, times) for name in works}


class Member:
    """One server at the URL."""

    def __init__(self, number: int, engine: str, python: str, model: Path, url: str, folder: Path) -> None:
        self.metrics = free_port()
        speculative: dict[str, object] = {"method": "sssd", "num_speculative_tokens": 8, "policy": "fixed"}
        speculative |= {"live": True, "datastore": url, "metrics_port": self.metrics, "recycle": "off"}
        log = folder / f"server-{number}.log"
        self.server = servers.build(str(number), engine, model, log, speculative=speculative, python=python)
        core = sorted(os.sched_getaffinity(0))[number % len(os.sched_getaffinity(0))]
        self.server.command = ["taskset", "-c", str(core), *self.server.command]
        self.server.env |= {"OMP_NUM_THREADS": "1", "FREEDRAFT_CACHE": str(folder / "cache")}
        self.server.start()

    def accepted(self) -> float:
        with urllib.request.urlopen(f"http://{HOST}:{self.metrics}/metrics", timeout=30) as answer:
            page = answer.read().decode()
        found = re.search(r'^freedraft_accepted_tokens_total{method="sssd"} (\S+)$', page, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def tokens_per_step(self, salt: str | None) -> float:
        """Ask, and return the answer's tokens for each step of the model."""
        before = self.accepted()
        body: dict[str, Any] = {"model": servers.MODEL_NAME, "prompt": QUESTION, "max_tokens": TOKENS}
        body |= {"temperature": 0, "ignore_eos": True} | ({"cache_salt": salt} if salt else {})
        request = urllib.request.Request(
            f"{self.server.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=300) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == TOKENS
        return round(TOKENS / max(1.0, TOKENS - (self.accepted() - before)), 3)


def measure(engines: list[str], pythons: list[str], model: Path, wait: float) -> dict[str, Any]:
    import fsspec
    from moto.server import ThreadedMotoServer

    s3 = ThreadedMotoServer(HOST, free_port())
    s3.start()
    host, port = s3.get_host_and_port()
    os.environ |= {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    fsspec.filesystem("s3").mkdir("servers")
    url = "s3://servers/demo"
    with tempfile.TemporaryDirectory() as name:
        both = zip(engines, pythons, strict=True)
        members = [Member(n, engine, python, model, url, Path(name)) for n, (engine, python) in enumerate(both)]
        try:
            for member in members:
                member.server.wait_until_ready()
                member.tokens_per_step("warm-up")
            one, other = members
            row: dict[str, Any] = {"engines": engines, "wait_seconds": wait}
            row["before"] = {"none": one.tokens_per_step(None), "other salt": other.tokens_per_step("other")}
            row["first_answer"] = one.tokens_per_step("team")
            time.sleep(wait)
            row["other_server"] = other.tokens_per_step("team")
            row["after"] = {"none": other.tokens_per_step(None), "other salt": other.tokens_per_step("third")}
            start = time.monotonic()
            maintenance.forget_at(url, [str(tenant_key("team"))])
            row["seconds_of_forget"] = round(time.monotonic() - start, 1)
            time.sleep(wait)
            with ThreadPoolExecutor() as pool:  # at once, or the second would learn from what the first says now
                row["forgotten"] = list(pool.map(lambda member: member.tokens_per_step("team"), members))
            return row
        finally:
            for member in members:
                member.server.stop()
            s3.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=Path("build/model"))
    parser.add_argument("--engines", nargs=2, default=["vllm", "vllm"])
    parser.add_argument("--pythons", nargs=2, default=[sys.executable, sys.executable])
    parser.add_argument("--wait", type=float, default=8.0)
    parser.add_argument("--kills", type=int)
    args = parser.parse_args()
    before = None if args.kills else earlier_figures(args.json)
    name = " and ".join(dict.fromkeys(args.engines))
    measured = kills(args.kills) if args.kills else {name: measure(args.engines, args.pythons, args.model, args.wait)}
    figures = (before or {}) | measured
    write_json(args.json, figures, earlier=bool(before))
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
