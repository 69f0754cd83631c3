"""n-grams and layer skip together against each of them alone, on vLLM's CPU build, by kind of prompt.

    python bench/composed.py --model build/model --json build/composed.json

One engine with method "freedraft" per model: the demo model, where layer skip cannot pay, and the deep synthetic one
of bench/lib/deep_model.py, where it can. Its four arms take turns prompt by prompt: no drafts, n-grams only, layer skip
only, both. bf16, compiled, one request at a time; prompts are read before the clock starts. Ratios to plain decoding
are medians over prompts and rounds, with the quarter below and above.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.lib.deep_model import SKIP_SET, build
from bench.lib.engine import ROOT, SKIP_SET_OF_DEMO, Engine, in_process
from bench.lib.machine import cores, cpu, rounded
from bench.lib.prompts import PROMPTS, chats
from bench.lib.results import write_json
from freedraft.draft import DraftBatch
from freedraft.hybrid.method import HybridMethod

K = 8
ARMS = {
    "plain": frozenset[str](),
    "sssd": frozenset({"sssd"}),
    "layerskip": frozenset({"layerskip"}),
    "both": frozenset({"sssd", "layerskip"}),
}


def speed(engine: Engine, prompt: list[int], arm: str, tokens: int) -> tuple[float, list[int]]:
    """Tokens per second of decoding, and the tokens."""
    method: HybridMethod = engine.method
    for part, name, attribute, off in (
        (method.host, "sssd", "propose", lambda step, max_draft_len: DraftBatch.roots(step.roots)),
        (method.model, "layerskip", "capacities", lambda step: np.zeros(step.batch_size, np.int32)),
    ):
        vars(part).pop(attribute, None)
        if name not in ARMS[arm]:
            setattr(part, attribute, off)
    run = engine.generate([prompt], tokens, drafting=bool(ARMS[arm]))
    return run.speed, run.tokens[0]


def measure(model: Path, skip_set: Path, tokens: int, rounds: int) -> dict[str, Any]:
    engine = Engine(model, {"method": "freedraft", "num_speculative_tokens": K, "skip_set": str(skip_set)})
    prompts = {kind: chats(model, texts) for kind, texts in PROMPTS.items()}
    for arm in ARMS:  # the controllers learn here what steps and passes cost
        for of_kind in prompts.values():
            speed(engine, of_kind[0], arm, tokens)
    result: dict[str, Any] = {}
    for kind, of_kind in prompts.items():
        ratios: dict[str, list[float]] = {arm: [] for arm in ARMS}
        same, total = 0, 0
        for turn in range(rounds):
            for prompt in of_kind:
                order = list(ARMS) if turn % 2 == 0 else list(ARMS)[::-1]
                speeds = {arm: speed(engine, prompt, arm, tokens) for arm in order}
                for arm, (tokens_per_second, answer) in speeds.items():
                    ratios[arm].append(tokens_per_second / speeds["plain"][0])
                    same += answer == speeds["plain"][1]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "build" / "model", help="the demo model")
    parser.add_argument("--deep-model", type=Path, default=ROOT / "build" / "deep", help="built here when missing")
    parser.add_argument("--skip-set", type=Path, default=SKIP_SET_OF_DEMO, help="for the demo model")
    parser.add_argument("--tokens", type=int, default=96, help="output tokens per prompt")
    parser.add_argument("--rounds", type=int, default=2, help="times that each prompt is answered by each arm")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--part", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        print(json.dumps(measure(args.model, args.skip_set, args.tokens, args.rounds)), flush=True)
        return
    if not (args.deep_model / "config.json").is_file():
        build(args.model, args.deep_model)

    def part(model: Path, skip_set: Path) -> Any:
        options = ("--part", "--model", model, "--skip-set", skip_set, "--tokens", args.tokens, "--rounds", args.rounds)
        return in_process(__file__, *options)

    figures = {
        "machine": f"{cpu()}, {cores()} cores",
        "max_draft_tokens": K,
        "output_tokens": args.tokens,
        "rounds": args.rounds,
        "demo model": part(args.model, args.skip_set),
        "deep model": part(args.deep_model, args.deep_model / SKIP_SET),
    }
    figures = rounded(figures)
    print(json.dumps(figures, indent=1))
    write_json(args.json, figures)


if __name__ == "__main__":
    main()
