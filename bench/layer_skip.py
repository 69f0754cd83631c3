"""Layer skipping on the CPU: a model on which it pays, and one on which it must switch itself off.

    python bench/layer_skip.py --model build/model --json build/layer-skip.json
    python bench/layer_skip.py --engine sglang --json build/layer-skip-sglang.json      # in SGLang's environment
    python bench/layer_skip.py --only windows --contexts 4000 --json build/windows.json

Parts, each in its own engine, bf16, compiled on vLLM; prefill is not timed:
- deep: the synthetic model of bench/lib/deep_model.py with a skip set of half of the sublayers. Plain and speculative
  decoding alternate inside one engine, group by group. Reported by batch size: the ratio, median over groups with
  quartiles; M, tokens per step and request; alpha, accepted share of draft tokens; c, time of a draft pass in plain
  steps; and the share reached of M alpha / ((M - 1) c + alpha).
- demo (vLLM): the demo model, too small for layer skipping to pay: the controller has to switch drafting off.
- windows (on request, alone): the demo model with `window: 512`, at prompts of --contexts tokens.
"""

import argparse
import json
import os
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.lib.deep_model import SKIP_SET, build
from bench.lib.engine import SKIP_SET_OF_DEMO, Run, engine_of, in_process
from bench.lib.machine import rounded, versions
from bench.lib.prompts import BY_KIND, chats, long_chats
from bench.lib.results import ROOT, write_json

K = 5
PARTS = {"vllm": ["deep", "demo"], "sglang": ["deep"]}


def row(baseline: list[Run], drafting: list[Run], batch: int) -> dict[str, Any]:
    """Return the figures of one batch size. A step lasts from the end of one call to the start of the next."""
    plain_speed, speed = (sum(r.decoded for r in runs) / sum(r.seconds for r in runs) for runs in (baseline, drafting))
    pairs = [b.speed / a.speed for a, b in zip(baseline, drafting, strict=True)]
    result: dict[str, Any] = {"batch": batch, "plain_tokens_per_second": plain_speed, "tokens_per_second": speed}
    result |= {"ratio": median(pairs), "ratio_quarters": np.quantile(pairs, (0.25, 0.75)).tolist()}
    result["ratio_spread"] = [min(pairs), max(pairs)]
    result["same"] = all(a.tokens == b.tokens for a, b in zip(baseline, drafting, strict=True))
    plain = median(b.began - a.ended for run in baseline for a, b in pairwise(run.calls) if a.batch == batch)
    steps = [(a, b) for run in drafting for a, b in pairwise(run.calls) if a.ids == b.ids]
    full = [(a, b) for a, b in steps if a.batch == batch and any(a.drafted)]
    result |= {"plain_ms": 1e3 * plain, "turns": len(pairs), "drafting_share": len(full) / len(steps)}
    drafted = sum(sum(a.drafted) for a, _ in steps)
    if drafted:
        accepted = sum(sum(b.gained) - b.batch for _, b in steps)
        rows = sum(a.batch for a, _ in steps)
        m, alpha, drafts = 1 + accepted / rows, accepted / drafted, drafted / rows
        c = median((a.ended - a.began) / max(a.drafted) for a, _ in full) / plain
        formula = m / (drafts * c + 1)  # as M alpha / ((M - 1) c + alpha), but also where nothing is accepted
        result |= {"M": m, "alpha": alpha, "drafts": drafts, "c": c}
        result["verify"] = median(b.began - a.ended for a, b in full) / plain
        result |= {"formula": formula, "share_of_formula": result["ratio"] / formula}
    return result


def settled(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run parts "deep", "demo" and "windows"; return a row for each batch size."""
    windows = args.part == "windows"
    at_once = max(args.batches)
    prompts = long_chats(args.model, args.contexts[0], max(6, at_once)) if windows else chats(args.model, BY_KIND)
    speculative = {"method": "layerskip", "num_speculative_tokens": K}
    speculative |= {"window": 512} if windows else {"skip_set": str(args.skip_set)}
    longest = max(1024, args.tokens + 64 + max(map(len, prompts)))

    def groups(batch: int) -> list[list[list[int]]]:
        return [prompts[i : i + batch] for i in range(0, len(prompts) - batch + 1, batch)]

    rows = []
    with engine_of(args.engine, args.model, speculative, requests=at_once, length=longest) as engine:
        # Warm-up: the controller learns step times and acceptance before it is measured.
        for batch in args.batches:
            for on in (False, True):
                engine.generate(prompts[:batch], args.tokens, drafting=on)
        for group in groups(at_once):
            engine.generate(group, args.tokens, drafting=True)
        for batch in args.batches:
            runs: tuple[list[Run], list[Run]] = [], []  # plain, drafting
            for turn in range(args.rounds):
                for group in groups(batch):
                    for on in (False, True) if turn % 2 == 0 else (True, False):
                        runs[on].append(engine.generate(group, args.tokens, drafting=on))
            rows.append(row(*runs, batch))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=tuple(PARTS), default="vllm")
    parser.add_argument("--model", type=Path, default=ROOT / "build" / "model", help="the demo model")
    parser.add_argument("--deep-model", type=Path, default=ROOT / "build" / "deep", help="built here when missing")
    parser.add_argument("--skip-set", type=Path, default=SKIP_SET_OF_DEMO, help="for the demo model")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--tokens", type=int, default=96, help="output tokens per prompt")
    parser.add_argument("--rounds", type=int, default=3, help="repeats of each group of prompts, both ways")
    parser.add_argument("--contexts", type=int, nargs="+", default=[4000], help="tokens of each prompt, part windows")
    parser.add_argument("--only", nargs="*", choices=(*PARTS["vllm"], "windows"), help="parts")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        print(json.dumps(settled(args)), flush=True)
        return
    if not (args.deep_model / "config.json").is_file():
        build(args.model, args.deep_model)
    deep, demo = (args.deep_model, args.deep_model / SKIP_SET), (args.model, args.skip_set)
    sizes = ("--engine", args.engine, "--rounds", args.rounds, "--tokens", args.tokens)

    def measured(part: str, model: Path, skip_set: Path, *more: object) -> Any:
        options = ("--part", part, "--model", model, "--skip-set", skip_set, *sizes, "--batches", *args.batches)
        return in_process(__file__, *options, *more)

    figures: dict[str, Any] = {"output_tokens": args.tokens}
    for part in args.only or PARTS[args.engine]:
        if part == "windows":
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "6")  # GiB
            by_context = {context: measured(part, *demo, "--contexts", context) for context in args.contexts}
            cells = [(context, row) for context, each in by_context.items() for row in each]
            rows = [row | {"context": at, "allowed": max(1.0, row.get("formula", 1.0))} for at, row in cells]
            figures |= versions(args.engine) | {"dtype": "bfloat16", "rows": rows}
        else:
            rows = measured(part, *(deep if part == "deep" else demo))
            of_vllm = {f"{part} model, bf16, compiled": {f"batch {row['batch']}": row for row in rows}}
            figures |= {"batches": rows} if args.engine == "sglang" else of_vllm
    figures = rounded(figures)
    print(json.dumps(figures, indent=1))
    write_json(args.json, figures)


if __name__ == "__main__":
    main()
