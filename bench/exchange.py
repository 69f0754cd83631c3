"""Servers that learn from each other at one URL: over HTTP, and killed at random moments.

    python bench/exchange.py --json OUT [--engines vllm vllm] [--pythons PYTHON PYTHON]
    python bench/exchange.py --json OUT --kills 100

Starts an S3-compatible server (moto) and two servers of an engine with the demo model, a core each. A client with a
salt asks the first server, and `--wait` seconds later the second one, which then drafts from that answer: tokens per
step before and after. Then `freedraft datastore forget URL`; both are asked again. Clients without a salt, and with
another one, ask the same: nobody else's text may be drafted for them, so their tokens per step stay.

With `--kills`: a process that learns, that forgets a tenant, or that exchanges (it learns, reads and erases by age), is
killed so often. What it had learnt two periods before must be at the URL, in order and no other, and nothing erased.
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
from sssd_plugin.datastore.live.tenant import tenant_digest

QUESTION = "Once upon a time, in a village by the sea, there lived"
TOKENS = 60
CLI = [sys.executable, "-c", "from sssd_plugin.datastore.cli import app; app()"]
NAMES = str(tenant_key("even")), str(tenant_key("odd"))
PERIOD = 0.1
"""Seconds between looks at the URL while processes are killed, so that a second has many of them."""


def text_of(number: int) -> list[int]:
    """Two ids that only this document has side by side, and then those of its tenant."""
    return [number // 600, 300 + number % 600, *([900 + number % 2] * (4 + number % 50))]


def learn(url: str, progress: Path, first: int, max_age: float | None = None) -> None:
    """Learn as a server does, and say which documents were learnt, and when."""
    server = open_live(url, 1000, max_age=max_age)
    server.flush()
    with progress.open("a", buffering=1) as out:
        for number in range(first, 1 << 30):
            while not server.insert(np.array(text_of(number), np.int32), server.tenant(NAMES[number % 2])):
                time.sleep(0.001)
            out.write(f"{number} {time.time()}\n")
            time.sleep(0.002)


def forget(url: str, progress: Path, first: int) -> None:
    maintenance.forget_at(url, [NAMES[1]])
    progress.write_text("done")


def exchange_texts(url: str, progress: Path, first: int) -> None:
    """Learn beside a neighbour whose documents grow too old all the time, so that batches are written anew."""
    learn(url, progress, first, max_age=1e6)


def kills(times: int) -> dict[str, Any]:
    exchange.POLL_SECONDS, exchange.FINISH_SECONDS, live_store.SYNC_SECONDS = PERIOD, 2 * PERIOD, PERIOD / 5
    rng, context = np.random.default_rng(), multiprocessing.get_context("fork")
    figures: dict[str, Any] = {"period_seconds": PERIOD}
    for name, work in (("learning", learn), ("forgetting", forget), ("exchanging", exchange_texts)):
        row = dict.fromkeys(("wrong", "lost", "came_back", "left_copies", "ended_before_the_kill"), 0)
        oldest_lost = 0.0
        with tempfile.TemporaryDirectory() as folder:
            os.environ["FREEDRAFT_CACHE"] = f"{folder}/cache"
            url, progress = f"file://{folder}/bucket", Path(folder, "progress")
            kept, number = set[int](), 0
            for _ in range(times):
                progress.unlink(missing_ok=True)
                server = open_live(url, 1000)  # a neighbour, which goes on
                server.flush()
                if work is not learn:
                    new = range(number, number + 40)
                    number += 40
                    for n in new:
                        server.insert(np.array(text_of(n), np.int32), server.tenant(NAMES[n % 2]))
                    kept |= set(new)
                    server.flush()
                process = context.Process(target=work, args=(url, progress, number))
                process.start()
                time.sleep(0.05 + float(rng.random()) * 1.2)
                killed = time.time()
                process.kill()
                process.join()
                lines = progress.read_text().split("\n") if progress.exists() else []
                done = lines == ["done"]
                row["ended_before_the_kill"] += done
                time.sleep(8 * PERIOD)  # the neighbour finishes an erasure
                server.close()
                key = Exchange(url, 1000).manifest()
                assert key is not None
                odd = tenant_digest(bytes.fromhex(key.key), NAMES[1])
                found = Exchange(url, 1000).documents()
                numbers = sorted(600 * r.tokens[0] + r.tokens[1] - 300 for r in found)
                row["wrong"] += any(
                    r.tokens.tolist() != text_of(n) or (r.tenant == odd) != n % 2
                    for r in found for n in [600 * int(r.tokens[0]) + int(r.tokens[1]) - 300]
                )  # fmt: skip
                learnt = {int(n): float(t) for n, t in (line.split() for line in lines[:-1])} if not done else {}
                missing = [t for n, t in learnt.items() if n not in numbers]
                row["lost"] += bool(missing)
                oldest_lost = max([oldest_lost, *(killed - t for t in missing)])
                kept |= {n for n in numbers if n >= number}
                number = max([number, *(n + 1 for n in (*numbers, *learnt))])
                if work is forget and (done or not any(n % 2 for n in numbers)):
                    row["came_back"] += any(n % 2 for n in numbers)
                    kept = {n for n in kept if n % 2 == 0}
                    copies = np.array([901] * 4, "<i4").tobytes()
                    row["left_copies"] += any(copies in p.read_bytes() for p in Path(folder).rglob("*") if p.is_file())
                row["wrong"] += set(numbers) != kept or len(numbers) != len(kept)
        figures[f"kills_while_{name}"] = {"kills": times, "documents": number, **row}
        figures[f"kills_while_{name}"]["oldest_lost_ms"] = round(oldest_lost * 1e3, 1)
    return figures


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
