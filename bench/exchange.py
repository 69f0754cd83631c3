"""Servers that share learnt text at one URL, over HTTP.

    python bench/exchange.py --json OUT

Two servers with the demo model, one core each, and an S3-compatible bucket (moto). A client with a salt asks the first
server and, 8 seconds later, the other one: tokens per step. Then the tenant is erased, and both are asked again.
Clients without a salt or with another one ask the same question and must not get drafts from that answer.
"""

import argparse
import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
from moto.server import ThreadedMotoServer

from bench.demo.measure import Client, as_chat
from bench.lib import servers
from bench.lib.results import write_json
from freedraft.tenants import tenant_key
from sssd_plugin.datastore.live import maintenance

QUESTION = "Once upon a time, in a village by the sea, there lived"
URL, WAIT = "s3://servers/demo", 8.0


def client_of(number: int, model: Path, folder: Path) -> Client:
    """Return a client of a vLLM server at the URL; the server is not started yet."""
    speculative: dict[str, object] = {"method": "sssd", "num_speculative_tokens": 8, "policy": "fixed"}
    speculative |= {"live": True, "datastore": URL, "recycle": "off"}
    log = folder / f"server-{number}.log"
    server = servers.build(str(number), "vllm", model, log, speculative=speculative)
    cores = sorted(os.sched_getaffinity(0))
    server.command = ["taskset", "-c", str(cores[number % len(cores)]), *server.command]
    server.env |= {"OMP_NUM_THREADS": "1", "FREEDRAFT_CACHE": str(folder / "cache")}
    return Client("vllm", server, 60)


def tokens_per_step(client: Client, salt: str | None) -> float:
    answer = client.ask(as_chat(QUESTION), salt)
    return round(len(answer.tokens) / max(1, answer.steps), 3)


def measure(one: Client, other: Client) -> dict[str, Any]:
    for client in (one, other):
        tokens_per_step(client, "warm-up")
    row: dict[str, Any] = {"wait_seconds": WAIT}
    row["before"] = {"other salt": tokens_per_step(one, "other")}  # requests without a salt would learn from each other
    row["first_answer"] = tokens_per_step(one, "team")
    time.sleep(WAIT)
    row["other_server"] = tokens_per_step(other, "team")
    row["after"] = {"none": tokens_per_step(other, None), "other salt": tokens_per_step(other, "third")}
    maintenance.forget_at(URL, [str(tenant_key("team"))])
    time.sleep(WAIT)
    with ThreadPoolExecutor() as pool:  # concurrently, or the second would learn from the first one's new answer
        row["forgotten"] = list(pool.map(tokens_per_step, (one, other), ("team", "team")))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--model", type=Path, default=Path("build/model"))
    args = parser.parse_args()
    s3 = ThreadedMotoServer(servers.HOST, servers.free_port())
    s3.start()
    host, port = s3.get_host_and_port()
    os.environ |= {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    fsspec.filesystem("s3").mkdir("servers")
    with tempfile.TemporaryDirectory() as name:
        one, other = (client_of(number, args.model, Path(name)) for number in range(2))
        with servers.running(one.server, other.server):
            figures = {"vllm": measure(one, other)}
    s3.stop()
    write_json(args.json, figures)
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
