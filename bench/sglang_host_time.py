"""What a decoding step of sssd on SGLang takes outside the target's forward pass: microseconds, by batch size.

    python bench/sglang_host_time.py --json OUT

On the CPU platform, with a tiny model of random weights and the demo model's vocabulary: the forward pass says nothing
here, what the host does around it does. Every step drafts and verifies as much as it may (policy fixed). What is
kernels on a GPU (the tree mask, slots, likeliest tokens, verification) computes on the host here, and is counted apart.
So is the preparation of a step before SGLang waits for the last one, which on a GPU still runs then.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.lib.host_time import TimedCalls
from bench.lib.machine import machine, rounded, versions
from bench.lib.results import earlier_figures, write_json
from bench.lib.sglang_plugin import ROOT, engine_with

LOG = "SGLANG_HOST_TIME_LOG"
PROMPT, WARM_STEPS = 400, 10
KERNELS = ("tree_inputs", "slots", "take_logits", "verify")
PARTS = ("forward", "prepare", "draft", "method", "lookup", *KERNELS)


def register() -> None:
    """Entry point of `sglang.srt.plugins`: times the steps of the scheduler, and writes a line for each."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.tp_worker import TpModelWorker

    from freedraft.engines.sglang import worker
    from freedraft.engines.sglang.drafting import Drafting
    from freedraft.engines.sglang.verify import TreeVerifier
    from freedraft.guarded_method import GuardedMethod
    from sssd_plugin.drafter import Drafter

    calls = TimedCalls()
    calls.time(TpModelWorker, "forward_batch_generation", "forward")
    calls.time(Drafting, "prepare")
    calls.time(Drafting, "draft")
    calls.time(Drafting, "take_logits")
    calls.time(GuardedMethod, "draft", "method")
    calls.time(Drafter, "draft", "lookup")
    calls.time(worker, "tree_inputs")
    calls.time(worker, "assign_extend_cache_locs_func", "slots")
    calls.time(TreeVerifier, "verify")
    run_batch = Scheduler.run_batch

    def timed(self: Any, batch: Any, *arguments: Any) -> Any:
        if not batch.forward_mode.is_decode():
            return run_batch(self, batch, *arguments)
        calls.clear()
        started = time.perf_counter()
        result = run_batch(self, batch, *arguments)
        step = {"batch": len(batch.reqs), "step": time.perf_counter() - started}
        step |= {name: sum(calls.seconds[name]) for name in PARTS}
        with Path(os.environ[LOG]).open("a") as file:
            file.write(json.dumps(step) + "\n")
        return result

    Scheduler.run_batch = timed


def measure(
    model: Path, text: list[int], batches: list[int], steps: int, env: dict[str, str], nodes: int
) -> list[dict[str, Any]]:
    """A row for each batch size, from one engine."""
    tokens = 4 * (WARM_STEPS + steps)
    options: dict[str, Any] = {"speculative_algorithm": "sssd", "speculative_num_draft_tokens": nodes}
    room = max(batches) * (PROMPT + tokens + 2 * nodes)
    options |= {"max_running_requests": max(batches), "max_total_tokens": 2 * room, "disable_radix_cache": True}
    found = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        ours = {"SCORING": "learned", "RECYCLE": "on", "DRAFT_TIMEOUT_MS": "20"}
        env = {f"FREEDRAFT_{name}": value for name, value in ours.items()} | {LOG: str(log)} | env
        with engine_with("bench.sglang_host_time:register", model, env, **options) as engine:
            for batch in batches:
                log.write_text("")
                prompts = [text[(97 * i) % (len(text) - PROMPT) :][:PROMPT] for i in range(batch)]
                sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens}
                engine.generate(input_ids=prompts, sampling_params=sampling)
                rows = [row for line in log.read_text().splitlines() if (row := json.loads(line))["batch"] == batch]
                found.append({"batch": batch} | figures(rows[WARM_STEPS : WARM_STEPS + steps]))
    return found


def figures(rows: list[dict[str, float]]) -> dict[str, Any]:
    us: dict[str, Any] = {}
    for row in rows:
        row["kernels"] = sum(row.pop(name) for name in KERNELS)
        row["host"] = row["step"] - row["forward"] - row["kernels"] - row["prepare"]
    for name in ("host", "prepare", "draft", "method", "lookup", "kernels", "forward"):
        ranked = sorted(1e6 * row[name] for row in rows)
        us[name] = {f"p{q}": ranked[q * len(ranked) // 100] for q in (25, 50, 75)}
    return {"steps": len(rows), "us": us}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--nodes", type=int, default=16)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--tokenizer", type=Path, default=ROOT / "build" / "model")
    parser.add_argument("--store", type=Path, default=ROOT / "build" / "store", help="built when it is not there")
    parser.add_argument("--arm", default="", help="name of these rows")
    parser.add_argument("--draft-timeout-ms", type=float, default=0.0, help="above 0, a thread of its own drafts")
    parser.add_argument("--json", type=Path, help="rows are added to those that it holds")
    args = parser.parse_args()
    from rich.console import Console
    from tokenizers import Tokenizer

    from bench.demo.store import ensure_store
    from tests.sglang.conftest import make_tiny

    ensure_store(args.store, args.tokenizer, Console(highlight=False))
    text = Tokenizer.from_file(str(args.tokenizer / "tokenizer.json")).encode((ROOT / "README.md").read_text()).ids
    env = {"FREEDRAFT_DATASTORE": str(args.store), "FREEDRAFT_DRAFT_TIMEOUT_MS": str(args.draft_timeout_ms)}
    result: dict[str, Any] = {"machine": machine(), "versions": versions("sglang", "torch"), "nodes": args.nodes}
    before = earlier_figures(args.json)
    result["rows"] = before["rows"] if before else []
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny(Path(folder), vocab_size=49152, tokenizer=args.tokenizer)
        for row in measure(model, text, args.batches, args.steps, env, args.nodes):
            result["rows"].append(rounded({"arm": args.arm} | row))
            us = {name: value["p50"] for name, value in row["us"].items()}
            print(
                f"{row['batch']:4} requests: {us['host']:.0f} us on the host, {us['draft']:.0f} of them for drafts "
                f"(the method takes {us['method']:.0f}, looking up {us['lookup']:.0f}); before {us['prepare']:.0f} us, "
                f"kernels {us['kernels']:.0f} us, forward {us['forward']:.0f} us",
                flush=True,
            )
    write_json(args.json, result, earlier=before is not None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
