"""Two servers that learn from each other through a bucket, over HTTP.

    python bench/fleet.py --json OUT [--engines vllm vllm] [--pythons PYTHON PYTHON]
    python bench/fleet.py --json OUT --kills 100

Starts an S3-compatible server (moto), two servers of an engine with the demo model, a core each, and
`freedraft datastore compact URL --every 1`. A client with a salt asks the first server, and `--wait` seconds later the
second one, which then drafts from that answer: tokens per step before and after. Then `freedraft datastore forget URL`;
as many seconds later both are asked again. Clients without a salt, and with another one, ask the same: nobody else's
text may be drafted for them, so their tokens per step stay.

With `--kills`: a process that publishes to a folder's URL, that forgets, or that compacts, is killed so often at random
moments. What is compacted from the bucket afterwards must be what was published, in its order, without what was erased,
and a server that starts then must see it, and show it to its tenant only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.lib import fleet_kills, servers
from bench.lib.results import earlier_figures, write_json
from bench.lib.servers import HOST, free_port

QUESTION = "Once upon a time, in a village by the sea, there lived"
TOKENS = 60
PERIOD = 1.0
CLI = [sys.executable, "-c", "from sssd_plugin.datastore.cli import app; app()"]


class Member:
    """One server of the fleet."""

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


def measure(engines: Sequence[str], pythons: Sequence[str], model: Path, wait: float) -> dict[str, Any]:
    from moto.server import ThreadedMotoServer

    s3 = ThreadedMotoServer(HOST, free_port())
    s3.start()
    host, port = s3.get_host_and_port()
    os.environ |= {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    import fsspec

    fsspec.filesystem("s3").mkdir("fleet")
    url = "s3://fleet/demo"
    with tempfile.TemporaryDirectory() as name:
        members = [
            Member(n, engine, python, model, url, Path(name))
            for n, (engine, python) in enumerate(zip(engines, pythons, strict=True))
        ]
        compaction = None
        try:
            for member in members:
                member.server.wait_until_ready()
            environment = os.environ | {"FREEDRAFT_CACHE": f"{name}/cache-of-compaction"}
            compaction = subprocess.Popen([*CLI, "compact", url, "--every", str(PERIOD)], env=environment)
            one, other = members
            for member in members:
                member.tokens_per_step("warm-up")
            row: dict[str, Any] = {"engines": list(engines), "wait_seconds": wait}
            row["before"] = {"none": one.tokens_per_step(None), "none again": one.tokens_per_step(None),
                             "other salt": other.tokens_per_step("other")}  # fmt: skip
            row["first_answer"] = one.tokens_per_step("team")
            time.sleep(wait)
            row["other_server"] = other.tokens_per_step("team")
            row["after"] = {"none": other.tokens_per_step(None), "none again": other.tokens_per_step(None),
                            "other salt": other.tokens_per_step("third")}  # fmt: skip
            start = time.monotonic()
            command = [*CLI, "forget", url, "--tenants", "-"]
            subprocess.run(command, input="team\n", text=True, check=True, env=environment)
            row["seconds_of_forget"] = round(time.monotonic() - start, 1)
            time.sleep(wait)
            row["seconds_until_asked"] = round(time.monotonic() - start, 1)
            with ThreadPoolExecutor() as pool:  # at once, or the second would learn from what the first says now
                row["forgotten"] = list(pool.map(lambda member: member.tokens_per_step("team"), members))
            return row
        finally:
            if compaction:
                compaction.terminate()
                compaction.wait()
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
    before = None
    if args.kills:
        figures: dict[str, Any] = {"period_seconds": fleet_kills.PERIOD} | {
            f"crashes_while_{name}": fleet_kills.kills_of(work, args.kills) for name, work in fleet_kills.WORKS.items()
        }
    else:
        before = earlier_figures(args.json)
        name = " and ".join(dict.fromkeys(args.engines))
        figures = (before or {}) | {name: measure(args.engines, args.pythons, args.model, args.wait)}
    write_json(args.json, figures, earlier=bool(before))
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
