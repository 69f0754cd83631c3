"""Layer skipping through SGLang's CPU platform, on the deep synthetic model of bench/lib/deep_model.py.

Baseline and speculative decoding take turns in one engine, request by request, so that both meet the same machine.
Reported by batch size: M (tokens per speculative step), alpha (share of drafted tokens accepted), c (a draft pass by a
plain step, medians), the ratio of speeds (median over pairs of requests), and its share of
M * alpha / ((M - 1) * c + alpha): what such a drafter can reach at most when verifying costs as much as a plain step
and nothing else costs anything (SWIFT, section 3). With --mixed-sets also a batch of four requests that ask for four
skip sets.

    python bench/layer_skip_sglang.py --model build/deep --json build/layer-skip-sglang.json
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.lib.deep_model import mixed_sets
from bench.lib.prompts import MIXED, chats
from bench.lib.results import write_json
from bench.lib.sglang_plugin import engine_with
from bench.lib.switch import Call, Switch, Turns, calls_in
from freedraft.step import Step

LOG = "LAYER_SKIP_BENCH_LOG"
ALGORITHM = "layerskip_in_turns"
BASELINE, DRAFTING = "plain", "draft"
KINDS = (BASELINE, DRAFTING)
TURNS, TURN = "turns", 4
"""Requests that are drafted for in every other turn of so many steps."""


def register() -> None:
    """Entry point of `sglang.srt.plugins` in the bench's engines: layer skip that leaves "plain" requests alone."""
    from freedraft.engines.sglang import registration
    from layerskip_plugin.method import SPEC

    registration.register(replace(SPEC, name=ALGORITHM, factory=f"{__name__}:make_method"))


def make_method(options: Any, context: Any, controller: Any = None) -> Any:
    from layerskip_plugin.method import SPEC

    method, turns = SPEC.make(options, context, controller), dict[str, Turns]()

    def wants(step: Step) -> bool:
        label = step.request_ids[0].rsplit("-", 1)[0]
        if label.startswith(TURNS):
            return turns.setdefault(label, Turns(TURN))(step)
        return not label.startswith(BASELINE)

    Switch(method, wants, Path(os.environ[LOG]))
    return method


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("build/deep"), help="what bench/lib/deep_model.py wrote")
    parser.add_argument("--skip-set", type=Path, help="default: skip_set.json of the model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lookahead", default="cost")
    parser.add_argument("--length", type=int, default=4, help="of lookahead 'fixed'")
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--tree", action="store_true", help="verify trees, not chains")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=6, help="of the demo's twelve")
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--mixed-sets", action="store_true", help="also four skip sets in one batch")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result: dict[str, Any] = {
        name: str(v) if isinstance(v, Path) else v
        for name, v in vars(args).items()
        if name not in ("json", "mixed_sets")
    }
    result["batches"] = measure(args, [args.skip_set or args.model / "skip_set.json"], args.batches)
    if args.mixed_sets:
        paths = mixed_sets(args.model)
        (row,) = measure(args, paths, [len(paths)], [path.stem for path in paths])
        result["mixed_sets"] = {"skip_sets": len(paths)} | row
    for batch in [*result["batches"], *([result["mixed_sets"]] if args.mixed_sets else [])]:
        print(
            f"batch {batch['batch']}{', mixed sets' if 'skip_sets' in batch else ''}: M {batch['M']:.2f}, alpha "
            f"{batch['alpha']:.3f}, c {batch['c']:.3f}, verify {batch['verify']:.2f} of a plain step "
            f"({batch['plain_ms']:.1f} ms), {batch['ratio']:.2f}x plain, "
            f"{batch['share']:.2f} of the formula's {batch['formula']:.2f}; same tokens: {batch['same']}"
        )
    write_json(args.json, result)


def measure(
    args: argparse.Namespace, skip_sets: Sequence[Path], batches: Sequence[int], choices: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """A row for each batch size, from one engine; with `choices`, request i of a batch asks for the i-th skip set."""
    prompts = chats(args.model, MIXED[: args.prompts], tokenize=False)
    answers: dict[tuple[str, int], list[Any]] = {}
    number = itertools.count()
    with tempfile.TemporaryDirectory() as name:
        log = Path(name) / "calls.jsonl"
        settings = {
            "FREEDRAFT_SKIP_SET": ",".join(map(str, skip_sets)),
            "FREEDRAFT_LOOKAHEAD": args.lookahead,
            "FREEDRAFT_LENGTH": str(args.length),
            "FREEDRAFT_TREE": str(int(args.tree)),
        }
        options = {"speculative_num_draft_tokens": args.nodes, "dtype": args.dtype}
        options |= {"max_running_requests": max(batches), "disable_radix_cache": True}
        with engine_in_turns(args.model, log, settings, **options) as engine:

            def generate(group: list[str], label: str, tokens: int) -> list[Any]:
                sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
                each = [sampling | {"custom_params": {"skip_set": choice}} for choice in choices]
                ids = [f"{label}-{next(number)}" for _ in group]
                return [o["output_ids"] for o in engine.generate(group, each or sampling, rid=ids)]

            for batch in batches:
                for kind in KINDS:  # warm-up: also teaches the policy what steps cost
                    generate([prompts[0]] * batch, f"{kind}-warm", 24)
                for start in range(0, len(prompts), batch):
                    group = [prompts[(start + i) % len(prompts)] for i in range(batch)]
                    for kind in KINDS:
                        answers.setdefault((kind, batch), []).extend(generate(group, f"{kind}-{batch}", args.tokens))
        calls = calls_in(log)
    return [
        {**figures(calls, batch), "same": answers[BASELINE, batch] == answers[DRAFTING, batch]} for batch in batches
    ]


def engine_in_turns(model: Path, log: Path, settings: dict[str, str], **options: Any) -> AbstractContextManager[Any]:
    """An engine whose requests "plain-..." are not drafted for, and "turns-..." in turns.

    Args:
        log: gets the calls of the drafter; settings: FREEDRAFT_* variables; options: of `sglang.Engine`.
    """
    entry, env = "bench.layer_skip_sglang:register", {LOG: str(log)} | settings
    return engine_with(entry, model, env, speculative_algorithm=ALGORITHM, **options)


Steps = list[tuple[Call, Call]]
"""Steps of the engine, each as the calls of the drafter before and after it."""


def speeds(steps: Steps) -> list[float]:
    """Tokens per second of each group of requests, in the order they came."""
    groups: dict[str, list[float]] = {}
    for call, after in steps:
        group = groups.setdefault(call.ids[0], [0.0, 0.0])
        group[0] += sum(after.gained)
        group[1] += after.began - call.began
    return [tokens / seconds for tokens, seconds in groups.values()]


def figures(calls: Sequence[Call], batch: int) -> dict[str, Any]:
    """The figures of full batches. A step runs from the beginning of its draft to that of the next one."""
    steps: dict[str, Steps] = {kind: [] for kind in KINDS}
    for call, after in itertools.pairwise(calls):
        for kind in KINDS:
            if call.ids == after.ids and call.batch == batch and call.ids[0].startswith(f"{kind}-{batch}-"):
                steps[kind].append((call, after))
    baseline, drafting = steps[BASELINE], steps[DRAFTING]
    baseline_step = statistics.median(after.began - call.began for call, after in baseline)
    request_steps = batch * len(drafting)
    tokens = sum(sum(after.gained) for _, after in drafting)
    per_step = tokens / request_steps
    drafted = sum(sum(call.drafted) for call, _ in drafting)
    # Tokens behind a rejected one have no verdict of their own.
    judged = sum(min(d, g) for call, after in drafting for d, g in zip(call.drafted, after.gained, strict=True))
    passes = [call.pass_seconds for call, _ in drafting if call.pass_seconds is not None]
    verify = [after.began - call.ended for call, after in drafting if any(call.drafted)]
    alpha = (tokens - request_steps) / drafted if drafted else 0.0
    c = statistics.median(passes) / baseline_step if passes else 0.0
    # Baseline and drafting requests came in turns: their speeds are compared pair by pair.
    pairs = [b / a for a, b in zip(speeds(baseline), speeds(drafting), strict=False)]
    ratio = statistics.median(pairs)
    formula = per_step * alpha / ((per_step - 1) * c + alpha) if drafted else 1.0
    return {
        "batch": batch,
        "steps": len(drafting),
        "M": per_step,
        "alpha": alpha,
        "c": c,
        "alpha_given": (tokens - request_steps) / judged if judged else 0.0,
        "drafted_per_step": drafted / request_steps,
        "drafting_share": sum(any(call.drafted) for call, _ in drafting) / len(drafting),
        "nodes_per_step": sum(call.nodes for call, _ in drafting) / request_steps,
        "verify": statistics.median(verify) / baseline_step if verify else 1.0,
        "plain_ms": 1e3 * baseline_step,
        "pass_ms": 1e3 * statistics.median(passes) if passes else 0.0,
        "ratio": ratio,
        "ratio_spread": [min(pairs), max(pairs)],
        "formula": formula,
        "share": ratio / formula,
    }


if __name__ == "__main__":
    main()
