"""n-grams and layer skip together against each of them alone, on vLLM's CPU build, by kind of prompt.

    python bench/composed.py --model build/model --json build/composed.json

One engine with method "freedraft" per model: the demo model, where layer skip cannot pay, and the deep synthetic one
of bench/deep_model.py, where it can. Its four arms take turns prompt by prompt: no drafts, n-grams only, layer skip
only, both. bf16, compiled, one request at a time; prompts are read before the clock starts. Ratios to plain decoding
are medians over prompts and rounds, with the quarter below and above.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from deep_model import SKIP_SET, build
from layer_skip import ROOT, SKIP_SET_OF_DEMO, machine, rounded
from prompts import PROMPTS
from servers import environment

K = 8
ARMS = {
    "plain": frozenset[str](),
    "sssd": frozenset({"sssd"}),
    "layerskip": frozenset({"layerskip"}),
    "both": frozenset({"sssd", "layerskip"}),
}


class Bench:
    """An engine in this process whose two drafters can be switched on and off."""

    def __init__(self, model: Path, skip_set: Path, tokens: int) -> None:
        from transformers import AutoTokenizer
        from vllm import LLM

        self.llm = LLM(
            str(model),
            dtype="bfloat16",
            max_model_len=1024,
            max_num_seqs=1,
            enable_prefix_caching=False,
            seed=0,
            speculative_config={"method": "freedraft", "num_speculative_tokens": K, "skip_set": str(skip_set)},
        )
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.tokens = tokens
        self.proposer = self.llm.llm_engine.model_executor.driver_worker.worker.model_runner.drafter

    def speed(self, text: str, arm: str) -> tuple[float, list[int]]:
        """(tokens per second of decoding, the tokens)."""
        from vllm import SamplingParams

        chat = [{"role": "user", "content": text}]
        prompt = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        parameters = SamplingParams(temperature=0, max_tokens=self.tokens, ignore_eos=True, detokenize=False)
        self.proposer.composer.drafting = ARMS[arm]
        with began(self.proposer) as first:
            (output,) = self.llm.generate([{"prompt_token_ids": prompt}], parameters, use_tqdm=False)
            seconds = time.perf_counter() - first[0]
        if self.proposer.failed:
            raise RuntimeError("drafting failed: see the log")
        return (self.tokens - 1) / seconds, list(output.outputs[0].token_ids)


@contextmanager
def began(proposer: Any) -> Iterator[list[float]]:
    """When the first token was there."""
    times: list[float] = []
    original = proposer.draft

    def draft(step: Any) -> Any:
        if not times:
            times.append(time.perf_counter())
        return original(step)

    proposer.draft = draft
    try:
        yield times
    finally:
        del proposer.draft


def measure(model: Path, skip_set: Path, tokens: int, rounds: int) -> dict[str, Any]:
    bench = Bench(model, skip_set, tokens)
    for arm in ARMS:  # what steps and passes cost is learnt here
        for texts in PROMPTS.values():
            bench.speed(texts[0], arm)
    result: dict[str, Any] = {}
    for kind, texts in PROMPTS.items():
        ratios: dict[str, list[float]] = {arm: [] for arm in ARMS}
        same, total = 0, 0
        for turn in range(rounds):
            for text in texts:
                order = list(ARMS) if turn % 2 == 0 else list(ARMS)[::-1]
                speeds = {arm: bench.speed(text, arm) for arm in order}
                for arm, (speed, said) in speeds.items():
                    ratios[arm].append(speed / speeds["plain"][0])
                    same += said == speeds["plain"][1]
                    total += 1
        result[kind] = {
            arm: {"ratio": float(np.median(r)), "quarters": np.quantile(r, (0.25, 0.75)).tolist()}
            for arm, r in ratios.items()
            if arm != "plain"
        }
        parts = [max(pair) for pair in zip(ratios["sssd"], ratios["layerskip"], strict=True)]
        better = max(result[kind][arm]["ratio"] for arm in ("sssd", "layerskip"))
        result[kind]["both by the better of the two"] = result[kind]["both"]["ratio"] / better
        result[kind]["both by the better of the two, prompt by prompt"] = float(
            np.median(np.array(ratios["both"]) / parts)
        )
        result[kind]["outputs like plain, bf16"] = f"{same} of {total}"
    return result


def run_part(model: Path, skip_set: Path, tokens: int, rounds: int) -> dict[str, Any]:
    """In a process of its own, with the environment of a CPU server."""
    command = [sys.executable, __file__, "--part", "--model", str(model), "--skip-set", str(skip_set)]
    command += ["--tokens", str(tokens), "--rounds", str(rounds)]
    env = environment("vllm") | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{model} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "build" / "model", help="the demo model")
    parser.add_argument("--deep-model", type=Path, default=ROOT / "build" / "deep", help="built here when missing")
    parser.add_argument("--skip-set", type=Path, default=SKIP_SET_OF_DEMO, help="for the demo model")
    parser.add_argument("--tokens", type=int, default=96, help="output tokens per prompt")
    parser.add_argument("--rounds", type=int, default=2, help="times that each prompt is answered by each arm")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        print(json.dumps(measure(given.model, given.skip_set, given.tokens, given.rounds)), flush=True)
        return
    if not (given.deep_model / "config.json").is_file():
        build(given.model, given.deep_model)
    figures = {
        "machine": machine(),
        "max_draft_tokens": K,
        "output_tokens": given.tokens,
        "rounds": given.rounds,
        "demo model": run_part(given.model, given.skip_set, given.tokens, given.rounds),
        "deep model": run_part(given.deep_model, given.deep_model / SKIP_SET, given.tokens, given.rounds),
    }
    text = json.dumps(rounded(figures), indent=1)
    print(text)
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
