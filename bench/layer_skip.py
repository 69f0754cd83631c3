"""Layer skipping on vLLM's CPU build: where it can pay, and where it cannot and must stop by itself.

    python bench/layer_skip.py --model build/model --json build/layer-skip.json

Three parts, each in an engine of its own:
- deep: the deep synthetic model of bench/deep_model.py, whose set skips a half of the sublayers; bf16, compiled. Plain
  and speculative decoding take turns inside one engine, group by group, because two runs differ by more than the
  effect. Reported by batch size: the ratio to plain decoding, the median over groups and its quarters; M, tokens per
  step and request; alpha, accepted by drafted tokens; c, the median time of a draft pass by that of a plain step; and
  the share that was reached of M alpha / ((M - 1) c + alpha), what it would be if verification cost a plain step and
  nothing else cost anything.
- demo: the demo model itself with a set of 12 of its 60 sublayers. It is too small for layer skipping to pay, so the
  controller has to end up off, and throughput to stay that of plain decoding.
- exact: both models in fp32, eager: the share of drafts accepted, and whether every token is that of plain decoding.

Prompts are read before the clock starts; only decoding counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from deep_model import SKIP_SET, build
from prompts import PROMPTS
from servers import environment

ROOT = Path(__file__).resolve().parents[1]
SKIP_SET_OF_DEMO = ROOT / "configs" / "skip_sets" / "smollm2-135m-instruct-12.json"
BATCHES = (1, 2, 4)
K = 5


class Bench:
    """An engine in this process whose drafting can be switched on and off."""

    def __init__(self, model: Path, skip_set: Path, *, exact: bool, tokens: int, k: int = K) -> None:
        from transformers import AutoTokenizer
        from vllm import LLM

        self.llm = LLM(
            str(model),
            dtype="float32" if exact else "bfloat16",
            enforce_eager=exact,
            max_model_len=1024,
            max_num_seqs=max(BATCHES),
            enable_prefix_caching=False,
            seed=0,
            speculative_config={"method": "layerskip", "num_speculative_tokens": k, "skip_set": str(skip_set)},
        )
        tokenizer = AutoTokenizer.from_pretrained(model)
        texts = [text for kind in PROMPTS.values() for text in kind]
        chats = [[{"role": "user", "content": text}] for text in texts]
        self.prompts = [
            tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats
        ]
        self.tokens = tokens
        runner = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner
        self.proposer = runner.drafter
        self.drafter = self.proposer.drafters[0]
        if exact:
            return
        # The controller learns here what steps cost and what is accepted; what is measured later is what it settles on.
        for batch in BATCHES:
            for on in (False, True):
                self.generate(self.prompts[:batch], drafting=on)
        for first in range(0, len(self.prompts), max(BATCHES)):
            self.generate(self.prompts[first : first + max(BATCHES)], drafting=True)

    def generate(self, prompts: list[list[int]], *, drafting: bool) -> Run:
        from vllm import SamplingParams

        parameters = SamplingParams(temperature=0, max_tokens=self.tokens, ignore_eos=True, detokenize=False)
        self.proposer.enabled = drafting
        with _watched(self.proposer, self.drafter.times, len(prompts)) as run:
            outputs = self.llm.generate([{"prompt_token_ids": p} for p in prompts], parameters, use_tqdm=False)
            run.ended = time.perf_counter()
        run.tokens = [list(output.outputs[0].token_ids) for output in outputs]
        if self.proposer.failed:
            raise RuntimeError("drafting failed: see the log")
        return run


class Run:
    """What one call of `generate` did.

    Attributes:
        began: when all prompts were read.
        first: tokens that were there then.
        steps: request-steps since, of which `verified` carried drafts.
        passes, plain: seconds of each draft pass and each plain step over all requests of the batch.
    """

    def __init__(self) -> None:
        self.began = self.ended = 0.0
        self.first = self.steps = self.drafted = self.accepted = self.verified = 0
        self.tokens: list[list[int]] = []
        self.passes: list[float] = []
        self.plain: list[float] = []

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def decoded(self) -> int:
        return sum(map(len, self.tokens)) - self.first


@contextmanager
def _watched(proposer: Any, times: Any, batch: int) -> Iterator[Run]:
    original: Callable[[Any], list[list[int]]] = proposer.draft
    note_draft, note_step = times.note_draft, times.note_step
    run = Run()

    def on_draft(size: int, seconds: float) -> None:
        if run.began and size == batch:
            run.passes.append(seconds)
        note_draft(size, seconds)

    def on_step(size: int, tokens: int, seconds: float) -> None:
        if run.began and size == tokens == batch:
            run.plain.append(seconds)
        note_step(size, tokens, seconds)

    def draft(step: Any) -> list[list[int]]:
        if run.began:
            drafted, accepted = step.verified
            run.steps += len(step.rows)
            run.drafted += drafted
            run.accepted += accepted
            run.verified += len(step.arguments["scheduler_output"].scheduled_spec_decode_tokens)
        elif len(step.rows) == batch:
            run.began = time.perf_counter()
            run.first = sum(len(step.runner.requests[request_id].output_token_ids) for request_id in step.request_ids)
        return original(step)

    proposer.draft = draft
    times.note_draft, times.note_step = on_draft, on_step
    try:
        yield run
    finally:
        del proposer.draft, times.note_draft, times.note_step


def in_turns(bench: Bench, batch: int, rounds: int) -> dict[str, Any]:
    """Plain and speculative decoding of all prompts, group by group."""
    plain: list[Run] = []
    drafting: list[Run] = []
    groups = [bench.prompts[i : i + batch] for i in range(0, len(bench.prompts), batch)]
    for turn in range(rounds):
        for group in groups:
            order = (False, True) if turn % 2 == 0 else (True, False)
            for on in order:
                (drafting if on else plain).append(bench.generate(group, drafting=on))
    speed = [sum(r.decoded for r in runs) / sum(r.seconds for r in runs) for runs in (plain, drafting)]
    pairs = [(b.decoded / b.seconds) / (a.decoded / a.seconds) for a, b in zip(plain, drafting, strict=True)]
    drafted, accepted = sum(r.drafted for r in drafting), sum(r.accepted for r in drafting)
    steps = sum(r.steps for r in drafting)
    result: dict[str, Any] = {
        "plain_tokens_per_second": speed[0],
        "tokens_per_second": speed[1],
        "ratio": median(pairs),
        "ratio_quarters": np.quantile(pairs, (0.25, 0.75)).tolist(),
        "steps_with_drafts": sum(r.verified for r in drafting) / steps,
        "plain_step_ms": 1e3 * median(second for run in plain for second in run.plain),
    }
    if drafted:
        result["draft_pass_ms"] = 1e3 * median(second for run in drafting for second in run.passes)
        m, alpha = 1 + accepted / steps, accepted / drafted
        c = result["draft_pass_ms"] / result["plain_step_ms"]
        formula = m * alpha / ((m - 1) * c + alpha)
        result |= {"M": m, "alpha": alpha, "c": c, "formula": formula, "share_of_formula": result["ratio"] / formula}
    return result


def deep(model: Path, skip_set: Path, tokens: int, rounds: int) -> dict[str, Any]:
    bench = Bench(model, skip_set, exact=False, tokens=tokens)
    return {f"batch {batch}": in_turns(bench, batch, rounds) for batch in BATCHES}


def demo(model: Path, skip_set: Path, tokens: int, rounds: int) -> dict[str, Any]:
    """In this order: acceptance would teach the controller, which has to find out by itself."""
    bench = Bench(model, skip_set, exact=False, tokens=tokens)
    return {f"batch {batch}": in_turns(bench, batch, rounds) for batch in BATCHES}


def exact(model: Path, skip_set: Path, tokens: int, rounds: int) -> dict[str, Any]:
    """Token identity under full-length drafts, and the share of first draft tokens that are accepted."""
    from layerskip_plugin.lookahead import Fixed

    bench = Bench(model, skip_set, exact=True, tokens=tokens)
    result: dict[str, Any] = {}
    same = []
    for batch in (1, 4):
        groups = [bench.prompts[i : i + batch] for i in range(0, len(bench.prompts), batch)]
        bench.drafter.policy = Fixed(K)
        for group in groups:
            same.append(bench.generate(group, drafting=False).tokens == bench.generate(group, drafting=True).tokens)
    bench.drafter.policy = Fixed(1)
    runs = [bench.generate([prompt], drafting=True) for prompt in bench.prompts]
    result["token_identical"] = all(same)
    result["prompts"] = len(bench.prompts)
    result["acceptance"] = sum(r.accepted for r in runs) / sum(r.drafted for r in runs)
    return result


PARTS = {"deep": deep, "demo": demo, "exact": exact}


def run_part(name: str, model: Path, skip_set: Path, tokens: int, rounds: int) -> dict[str, Any]:
    """A part in a process of its own, with the environment of a CPU server."""
    command = [sys.executable, __file__, "--part", name, "--model", str(model), "--skip-set", str(skip_set)]
    command += ["--tokens", str(tokens), "--rounds", str(rounds)]
    # One process, so that the proposer can be reached; warnings only.
    env = environment("vllm") | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"part {name} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def machine() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "build" / "model", help="the demo model")
    parser.add_argument("--deep-model", type=Path, default=ROOT / "build" / "deep", help="built here when missing")
    parser.add_argument("--skip-set", type=Path, default=SKIP_SET_OF_DEMO, help="for the demo model")
    parser.add_argument("--tokens", type=int, default=96, help="output tokens per prompt")
    parser.add_argument("--rounds", type=int, default=3, help="times that each group of prompts is decoded both ways")
    parser.add_argument("--only", nargs="*", choices=("deep", "demo", "exact"), default=("deep", "demo", "exact"))
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        print(json.dumps(PARTS[given.part](given.model, given.skip_set, given.tokens, given.rounds)), flush=True)
        return
    if not (given.deep_model / "config.json").is_file():
        build(given.model, given.deep_model)
    deep_set = given.deep_model / SKIP_SET
    tokens, rounds = given.tokens, given.rounds
    figures: dict[str, Any] = {"machine": machine(), "max_draft_tokens": K, "output_tokens": tokens}
    if "deep" in given.only:
        figures["deep model, bf16, compiled"] = run_part("deep", given.deep_model, deep_set, tokens, rounds)
    if "demo" in given.only:
        figures["demo model, bf16, compiled"] = run_part("demo", given.model, given.skip_set, tokens, rounds)
    if "exact" in given.only:
        few = max(16, tokens // 2)
        figures["deep model, fp32, eager"] = run_part("exact", given.deep_model, deep_set, few, 1)
        figures["demo model, fp32, eager"] = run_part("exact", given.model, given.skip_set, few, 1)
    text = json.dumps(rounded(figures), indent=1)
    print(text)
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(text + "\n", encoding="utf-8")


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
