"""Layer skipping on the CPU: a model on which it pays, and one on which it must switch itself off.

    python bench/layer_skip.py --model build/model --json build/layer-skip.json
    python bench/layer_skip.py --engine sglang --json build/layer-skip-sglang.json      # in SGLang's environment
    python bench/layer_skip.py --only composed --json build/composed.json
    python bench/layer_skip.py --only swift --skip-ratio 0.2 0.45 --json build/swift.json
    python bench/layer_skip.py --only methods --data code.jsonl maths.jsonl --json build/methods.json

Parts, each in its own engine, bf16, compiled on vLLM; prefill is not timed:
- deep: the synthetic model of bench/lib/deep_model.py with a skip set of half of the sublayers. Plain and speculative
  decoding alternate inside one engine, group by group. Reported by batch size: the ratio, median over groups with
  quartiles; M, tokens per step and request; alpha, accepted share of draft tokens; c, time of a draft pass in plain
  steps; and the share reached of M alpha / ((M - 1) c + alpha).
- demo (vLLM): the demo model, too small for layer skipping to pay: the controller has to switch drafting off.
- windows (on request, alone): the demo model with `window: auto`, at prompts of --contexts tokens.
- composed (vLLM, on request): method "freedraft" on both models, by kind of prompt: no drafts, n-grams only, layer
  skipping only and both, alternating prompt by prompt.
- swift (vLLM, on request; uncompiled, as in the paper): SWIFT as published on the graded deep model, but for siblings,
  which chains do not have, and its parts removed one by one (the paper's table 8). Searches read half of the prompts
  and take half of the time; then all arms answer the other prompts in turns, with the sets that were found. "least
  scales" skips the copied sublayers of the smallest scales, which only the maker of the model knows.
- methods (vLLM, on request; uncompiled): all ways to choose the sublayers on the model of --data, each file a domain.
"""

import argparse
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from bench.lib.deep_model import GRADED, SKIP_SET, build, build_domains
from bench.lib.engine import SKIP_SET_OF_DEMO, Run, VllmEngine, engine_of, in_process
from bench.lib.machine import rounded, versions
from bench.lib.methods import methods, row, swift
from bench.lib.prompts import BY_KIND, PROMPTS, chats, long_chats
from bench.lib.results import ROOT, write_json
from freedraft.draft import DraftBatch
from freedraft.hybrid.method import HybridMethod

K, COMPOSED_K = 5, 8
PARTS = {"vllm": ["deep", "demo"], "sglang": ["deep"]}
ARMS = {"plain": (), "sssd": ("sssd",), "layerskip": ("layerskip",), "both": ("sssd", "layerskip")}


def settled(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run parts "deep", "demo" and "windows"; return a row for each batch size."""
    windows = args.part == "windows"
    at_once = max(args.batches)
    prompts = long_chats(args.model, args.contexts[0], max(6, at_once)) if windows else chats(args.model, BY_KIND)
    speculative = {"method": "layerskip", "num_speculative_tokens": K}
    speculative |= {"window": "auto"} if windows else {"skip_set": str(args.skip_set)}
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


def of_window(row: dict[str, Any], context: int) -> dict[str, Any]:
    """Return the same figures under the names that the tables of windows use."""
    names = ("batch", "turns", "drafting_share", "plain_ms", "ratio", "same")
    found = {"context": context} | {name: row[name] for name in names} | {"ratio_quartiles": row["ratio_quarters"]}
    found |= {
        "c": row.get("c", 0.0),
        "alpha": row.get("alpha", 0.0),
        "verify": [row["verify"]] if "verify" in row else [],
    }
    return found | {"allowed": max(1.0, row.get("formula", 1.0))}


def composed(args: argparse.Namespace) -> dict[str, Any]:
    """Return ratios to plain decoding by kind of prompt: medians over prompts and rounds, with quartiles."""
    speculative = {"method": "freedraft", "live": "off", "num_speculative_tokens": COMPOSED_K}
    engine = VllmEngine(args.model, speculative | {"skip_set": str(args.skip_set)})
    method: HybridMethod = engine.method
    off = {
        "sssd": (method.host, "propose", lambda step, max_draft_len: DraftBatch.roots(step.roots)),
        "layerskip": (method.model, "capacities", lambda step: np.zeros(step.batch_size, np.int32)),
    }

    def answer(prompt: list[int], arm: str) -> Run:
        for name, (part, attribute, nothing) in off.items():
            vars(part).pop(attribute, None)
            if name not in ARMS[arm]:
                setattr(part, attribute, nothing)
        return engine.generate([prompt], args.tokens, drafting=arm != "plain")

    prompts = {kind: chats(args.model, texts) for kind, texts in PROMPTS.items()}
    for arm in ARMS:  # warm-up: the controllers learn times of steps and passes
        for of_kind in prompts.values():
            answer(of_kind[0], arm)
    result: dict[str, Any] = {}
    for kind, of_kind in prompts.items():
        ratios: dict[str, list[float]] = {arm: [] for arm in ARMS if arm != "plain"}
        for turn in range(args.rounds):
            for prompt in of_kind:
                runs = {arm: answer(prompt, arm) for arm in list(ARMS)[:: 1 if turn % 2 == 0 else -1]}
                for arm, of_arm in ratios.items():
                    of_arm.append(runs[arm].speed / runs["plain"].speed)
        result[kind] = {
            arm: {"ratio": median(r), "quarters": np.quantile(r, (0.25, 0.75)).tolist()} for arm, r in ratios.items()
        }
    return result


MEASURE: dict[str, Callable[[argparse.Namespace], Any]] = {"composed": composed, "swift": swift, "methods": methods}


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
    parser.add_argument("--graded-model", type=Path, default=ROOT / "build" / "graded", help="built when missing")
    parser.add_argument("--domain-model", type=Path, default=ROOT / "build" / "domain", help="built when missing")
    parser.add_argument("--data", type=Path, nargs="+", default=[], help="JSONL files of prompts, part methods")
    parser.add_argument("--skip-ratio", type=float, nargs="+", default=[0.2, 0.45], help="if not yet in --json")
    parser.add_argument("--seconds", type=float, default=150.0, help="of the processor for a search, at most")
    parser.add_argument("--only", nargs="*", choices=(*PARTS["vllm"], *MEASURE, "windows"), help="parts")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        print(json.dumps(MEASURE.get(args.part, settled)(args)), flush=True)
        return
    if not (args.deep_model / "config.json").is_file():
        build(args.model, args.deep_model)
    deep, demo = (args.deep_model, args.deep_model / SKIP_SET), (args.model, args.skip_set)
    sizes = ("--engine", args.engine, "--rounds", args.rounds, "--tokens", args.tokens)

    def measured(part: str, model: Path, skip_set: Path, *more: object) -> Any:
        options = ("--part", part, "--model", model, "--skip-set", skip_set, *sizes, "--batches", *args.batches)
        return in_process(__file__, *options, *more)

    names = args.only or PARTS[args.engine]
    figures: dict[str, Any] = {"output_tokens": args.tokens}
    for part in names:
        if part == "composed":
            figures |= {"demo model": measured(part, *demo), "deep model": measured(part, *deep)}
        elif part in ("swift", "methods"):
            make = partial(build, bounds=GRADED) if part == "swift" else partial(build_domains, data=args.data)
            model = args.graded_model if part == "swift" else args.domain_model
            if not (model / "config.json").is_file():
                make(args.model, model)
            more = (*(("--data", *args.data) if args.data else ()), "--seconds", args.seconds, "--skip-ratio")
            known = json.loads(args.json.read_text()) if args.json and args.json.is_file() else {}
            by_ratio = figures["by_ratio"] = known.get("by_ratio", [])
            for ratio in sorted({*args.skip_ratio} - {one["skip_ratio"] for one in by_ratio}, reverse=True):
                by_ratio.append(measured(part, model, args.skip_set, *more, ratio))
                write_json(args.json, rounded(figures), args.data)
        elif part == "windows":
            os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "6")  # GiB
            by_context = {context: measured(part, *demo, "--contexts", context) for context in args.contexts}
            rows = [of_window(row, context) for context, each in by_context.items() for row in each]
            figures |= versions(args.engine) | {"dtype": "bfloat16", "rows": rows}
        else:
            rows = measured(part, *(deep if part == "deep" else demo))
            of_vllm = {f"{part} model, bf16, compiled": {f"batch {row['batch']}": row for row in rows}}
            figures |= {"batches": rows} if args.engine == "sglang" else of_vllm
    figures = rounded(figures)
    print(json.dumps(figures, indent=1))
    write_json(args.json, figures, args.data)


if __name__ == "__main__":
    main()
