"""Layer skipping on vLLM's CPU build: where it can pay, and where it cannot and must stop by itself.

    python bench/layer_skip.py --model build/model --json build/layer-skip.json

Four parts, each in an engine of its own:
- deep: the deep synthetic model of bench/lib/deep_model.py, whose set skips a half of the sublayers; bf16, compiled.
  Baseline and speculative decoding take turns inside one engine, group by group, because two runs differ by more than
  the effect. Reported by batch size: the ratio to plain decoding, the median over groups and its quarters; M, tokens
  per step and request; alpha, accepted by drafted tokens; c, the median time of a draft pass by that of a plain step;
  and the share that was reached of M alpha / ((M - 1) c + alpha), what it would be if verification cost a plain step
  and nothing else cost anything.
- demo: the demo model itself with a set of 12 of its 60 sublayers. It is too small for layer skipping to pay, so the
  controller has to end up off, and throughput to stay that of plain decoding.
- exact: both models in fp32, eager: the share of drafts accepted, and whether every token is that of plain decoding.
- mixed sets (--mixed-sets): four requests of one batch, each with another skip set of the deep model.

Prompts are read before the clock starts; only decoding counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.lib.deep_model import SKIP_SET, build, mixed_sets
from bench.lib.engine import ROOT, SKIP_SET_OF_DEMO, Engine, Run, in_process
from bench.lib.machine import cores, cpu, rounded
from bench.lib.prompts import BY_KIND, chats
from bench.lib.results import write_json
from bench.lib.switch import baseline_seconds, verdicts

BATCHES = (1, 2, 4)
K = 5


class Bench:
    """The demo's prompts, and an engine that drafts with one or several skip sets."""

    def __init__(self, args: argparse.Namespace, **options: Any) -> None:
        self.tokens, self.rounds = args.tokens, args.rounds
        self.prompts: list[list[int]] = chats(args.model, BY_KIND)
        speculative = {"method": "layerskip", "num_speculative_tokens": K, "skip_set": str(args.skip_set)} | options
        self.engine = Engine(args.model, speculative, max_num_seqs=max(BATCHES), exact=args.part == "exact")

    def generate(self, prompts: list[list[int]], drafting: bool, sets: list[str] | None = None) -> Run:
        extras = [{"skip_set": name} for name in sets or []]
        return self.engine.generate(prompts, self.tokens, drafting=drafting, extras=extras)

    def groups(self, batch: int) -> list[list[list[int]]]:
        return [self.prompts[i : i + batch] for i in range(0, len(self.prompts), batch)]

    def settle(self, sets: list[str] | None = None) -> None:
        """Let the controller learn what steps cost and what is accepted: what it settles on is measured later."""
        for batch in BATCHES if sets is None else (len(sets),):
            for on in (False, True):
                self.generate(self.prompts[:batch], on, sets)
        for group in self.groups(max(BATCHES)):
            self.generate(group, True, sets)

    def in_turns(self, batch: int, sets: list[str] | None = None) -> tuple[list[Run], list[Run]]:
        """Baseline and speculative decoding of all prompts, group by group."""
        runs: tuple[list[Run], list[Run]] = [], []
        for turn in range(self.rounds):
            for group in self.groups(batch):
                for on in (False, True) if turn % 2 == 0 else (True, False):
                    runs[on].append(self.generate(group, on, sets))
        return runs


def row(baseline: list[Run], drafting: list[Run], batch: int) -> dict[str, Any]:
    """The figures of one batch size, or of mixed sets."""
    speed = [sum(r.decoded for r in runs) / sum(r.seconds for r in runs) for runs in (baseline, drafting)]
    pairs = [b.speed / a.speed for a, b in zip(baseline, drafting, strict=True)]
    judged = [verdict for run in drafting for verdict in verdicts(run.calls)]
    steps, drafted, accepted = len(judged), sum(d for d, _ in judged), sum(a for _, a in judged)
    result: dict[str, Any] = {
        "plain_tokens_per_second": speed[0],
        "tokens_per_second": speed[1],
        "ratio": median(pairs),
        "ratio_quarters": np.quantile(pairs, (0.25, 0.75)).tolist(),
        "steps_with_drafts": sum(d > 0 for d, _ in judged) / steps,
        "plain_step_ms": 1e3 * median(s for run in baseline for s in baseline_seconds(run.calls, batch)),
    }
    passes = [c.pass_seconds for r in drafting for c in r.calls if c.batch == batch and c.pass_seconds is not None]
    if drafted:
        result["draft_pass_ms"] = 1e3 * median(passes)
        m, alpha = 1 + accepted / steps, accepted / drafted
        c = result["draft_pass_ms"] / result["plain_step_ms"]
        formula = m * alpha / ((m - 1) * c + alpha)
        result |= {"M": m, "alpha": alpha, "c": c, "formula": formula, "share_of_formula": result["ratio"] / formula}
    return result


def settled(args: argparse.Namespace) -> dict[str, Any]:
    """Parts "deep" and "demo": a row for each batch size."""
    bench = Bench(args)
    bench.settle()
    return {f"batch {batch}": row(*bench.in_turns(batch), batch) for batch in BATCHES}


def mixed(args: argparse.Namespace) -> dict[str, Any]:
    """Four requests that ask for four skip sets, in one batch."""
    paths = mixed_sets(args.model)
    bench, names = Bench(args, skip_set=",".join(map(str, paths))), [path.stem for path in paths]
    bench.settle(names)
    return {"skip_sets": len(names)} | row(*bench.in_turns(len(names), names), len(names))


def exact(args: argparse.Namespace) -> dict[str, Any]:
    """Token identity under drafts of a fixed length, and the share of draft tokens that are accepted one by one."""
    bench = Bench(args, lookahead="fixed", num_speculative_tokens=args.length)
    if args.length == 1:
        figures = row(*bench.in_turns(1), 1)
        return {"acceptance": figures["alpha"]}
    same = [a.tokens == b.tokens for batch in (1, 4) for a, b in zip(*bench.in_turns(batch), strict=True)]
    return {"token_identical": all(same), "prompts": len(bench.prompts)}


PARTS = {"deep": settled, "demo": settled, "mixed": mixed, "exact": exact}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ROOT / "build" / "model", help="the demo model")
    parser.add_argument("--deep-model", type=Path, default=ROOT / "build" / "deep", help="built here when missing")
    parser.add_argument("--skip-set", type=Path, default=SKIP_SET_OF_DEMO, help="for the demo model")
    parser.add_argument("--tokens", type=int, default=96, help="output tokens per prompt")
    parser.add_argument("--rounds", type=int, default=3, help="times that each group of prompts is decoded both ways")
    parser.add_argument("--only", nargs="*", choices=("deep", "demo", "exact"), default=("deep", "demo", "exact"))
    parser.add_argument("--mixed-sets", action="store_true", help="also four skip sets in one batch, on the deep model")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--length", type=int, default=K, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        print(json.dumps(PARTS[args.part](args)), flush=True)
        return
    if not (args.deep_model / "config.json").is_file():
        build(args.model, args.deep_model)
    models = {"deep": (args.deep_model, args.deep_model / SKIP_SET), "demo": (args.model, args.skip_set)}

    def part(name: str, model: str, tokens: int = args.tokens, rounds: int = args.rounds, length: int = K) -> Any:
        folder, skip_set = models[model]
        options = ("--part", name, "--model", folder, "--skip-set", skip_set, "--tokens", tokens)
        return in_process(__file__, *options, "--rounds", rounds, "--length", length)

    figures: dict[str, Any] = {"machine": f"{cpu()}, {cores()} cores"}
    figures |= {"max_draft_tokens": K, "output_tokens": args.tokens}
    for name in models:
        if name in args.only:
            figures[f"{name} model, bf16, compiled"] = part(name, name)
    if args.mixed_sets:
        figures["mixed_sets"] = part("mixed", "deep")
    if "exact" in args.only:
        few = max(16, args.tokens // 2)
        for name in models:
            each = [part("exact", name, few, 1, length) for length in (K, 1)]
            figures[f"{name} model, fp32, eager"] = each[0] | each[1]
    figures = rounded(figures)
    print(json.dumps(figures, indent=1))
    write_json(args.json, figures)


if __name__ == "__main__":
    main()
