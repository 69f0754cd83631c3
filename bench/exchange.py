"""Servers that learn from each other at one URL: over HTTP, and killed at random moments.

    python bench/exchange.py --json OUT [--engines vllm vllm] [--pythons PYTHON PYTHON]
    python bench/exchange.py --json OUT --kills 100

Starts an S3-compatible server (moto) and two servers of an engine with the demo model, a core each. A client with a
salt asks the first server, and `--wait` seconds later the second one, which then drafts from that answer: tokens per
step before and after. Then `freedraft datastore forget URL`; both are asked again. Clients without a salt, and with
another one, ask the same: nobody else's text may be drafted for them, so their tokens per step stay.

With `--kills`: a process that learns, that forgets a tenant, or that learns and finishes an erasure that was begun, is
killed so often beside a server. Then the URL holds what was learnt, no other text, and nothing that was erased.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
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
CLI = [sys.executable, "-c", "from sssd_plugin.datastore.cli import app; app()"]
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


def finish(url: str, progress: Path, first: int) -> None:
    learn(url, progress, first)


def kills_of(work: Callable[[str, Path, int], None], times: int) -> dict[str, Any]:
    rng, row = np.random.default_rng(), Counter[str]()
    oldest = 0.0
    with tempfile.TemporaryDirectory() as name:
        os.environ["FREEDRAFT_CACHE"] = f"{name}/cache"
        url, progress, kept, first = f"file://{name}/bucket", Path(name, "progress"), set[int](), 0
        for _ in range(times):
            progress.write_text("")
            server = open_live(url, 1000)
            server.flush()
            for number in range(first, first + 40):
                insert(server, number)
            kept |= set(range(first, first + 40))
            first += 40
            server.flush()
            manifest = Exchange(url, 1000).manifest()
            assert manifest is not None
            odd = tenant_digest(bytes.fromhex(manifest.key), NAMES[1])
            if work is finish:
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
            documents = Exchange(url, 1000).documents()
            numbers = sorted(600 * int(d.tokens[0]) + int(d.tokens[1]) - 300 for d in documents)
            wrong = sum(d.tokens.tolist() not in map(text_of, numbers) or (d.tenant == odd) != d.tokens[-1] - 900
                        for d in documents)  # fmt: skip
            learnt = {int(n): float(at) for n, at in (line.split() for line in lines[:-1])}
            missing = [at for n, at in learnt.items() if n not in numbers]
            oldest = max([oldest, *(killed - at for at in missing)])
            erased = work is finish or (work is forget and (lines == ["done"] or not any(n % 2 for n in numbers)))
            if erased:
                row["erasures_that_came_back"] += any(n % 2 and n < first for n in numbers)
                kept = {n for n in kept if n % 2 == 0}
                if work is forget:
                    copies = np.array([901] * 4, "<i4").tobytes()
                    row["erasures_that_left_copies"] += any(
                        copies in path.read_bytes() for path in Path(name).rglob("*") if path.is_file()
                    )
            kept |= {n for n in numbers if n >= first}
            first = max([first, *(n + 1 for n in (*numbers, *learnt))])
            row["ended_before_the_kill"] += lines == ["done"]
            row["restarts_with_wrong_data"] += bool(wrong) or numbers != sorted(kept)
            row["restarts_that_lost_something"] += bool(missing)
    return {"kills": times, "documents": first, **row, "oldest_lost_ms": round(oldest * 1e3, 1)}


def kills(times: int) -> dict[str, Any]:
    exchange.POLL_SECONDS, exchange.FINISH_SECONDS, live_store.SYNC_SECONDS = PERIOD, 2 * PERIOD, PERIOD / 5
    works = {"learning": learn, "forgetting": forget, "exchanging": finish}
    return {"period_seconds": PERIOD} | {f"kills_while_{name}": kills_of(work, times) for name, work in works.items()}


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
            subprocess.run([*CLI, "forget", url, "--tenants", "-"], input="team\n", text=True, check=True)
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
