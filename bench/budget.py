"""Policies of the draft budget against each other, on vLLM: plain, fixed 4, fixed 8, knee, auto, by batch size.

Two engines are loaded, stock vLLM without speculation and vLLM with SSSD; the arms take turns within each round, in a
new order each time, on prompts of all four kinds mixed. A second part changes the traffic between code and stories and
draws how auto follows.

    python bench/budget.py --model build/model --json build/budget.json --plot build/budget.png
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.lib.arms import Arms
from bench.lib.prompts import PROMPTS, chats
from bench.lib.results import write_json
from bench.lib.servers import in_process_environment

ARMS: dict[str, tuple[str, int | None] | None] = {
    "plain": None,
    "fixed 4": ("fixed", 4),
    "fixed 8": ("fixed", 8),
    "knee": ("knee", None),
    "auto": ("auto", None),
}
MAX_DRAFT_TOKENS = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("build/model"))
    parser.add_argument("--datastore", type=Path, help="default: none")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--traffic-steps", type=int, default=400, help="per phase of the second part; 0 leaves it out")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    os.environ.update(in_process_environment())
    kinds = {kind: chats(args.model, texts) for kind, texts in PROMPTS.items()}
    options = {"dtype": args.dtype, "enforce_eager": True, "max_model_len": 2048, "max_num_seqs": 32}
    # Arms and rounds repeat the prompts: what the model said to one of them is not to draft for the next.
    speculative = {"method": "sssd", "num_speculative_tokens": MAX_DRAFT_TOKENS, "recycle": "off"}
    if args.datastore:
        speculative["datastore"] = str(args.datastore)
    plain, ours = Arms(args.model, None, **options), Arms(args.model, speculative, **options)
    try:
        plain.wait()
        ours.wait()
        result = {"model": args.model.name, "dtype": args.dtype, "tokens": args.tokens, "rounds": args.rounds}
        result["controller_us"] = controller_cost()
        print(f"controller: {result['controller_us']:.1f} us per step at batch 32")
        result["rows"] = [measure(plain, ours, kinds, batch, args) for batch in args.batches]
        if args.traffic_steps:
            result["traffic"] = traffic(ours, kinds, args.traffic_steps)
    finally:
        plain.close()
        ours.close()
    write_json(args.json, result)
    if args.plot:
        plot(result, args.plot)


def mixed(kinds: dict[str, list[list[int]]], batch: int) -> list[list[int]]:
    """Every prompt at least once, the kinds taking turns; no fewer prompts than two batches."""
    once = [prompt for turn in zip(*kinds.values(), strict=True) for prompt in turn]
    return once * -(-2 * batch // len(once))


def measure(plain: Arms, ours: Arms, kinds: dict[str, list[list[int]]], batch: int, args: argparse.Namespace) -> dict:
    """All arms at one batch size. The first round warms up and teaches auto; it is not counted."""
    prompts = mixed(kinds, batch)
    rates: dict[str, list[float]] = {name: [] for name in ARMS}
    per_step: dict[str, float] = {}
    answers: dict[str, list[list[int]]] = {}
    shuffled = random.Random(batch)
    for round_ in range(args.rounds + 1):
        order = list(ARMS)
        shuffled.shuffle(order)
        for name in order:
            arm = ARMS[name]
            if arm is not None:
                ours.policy(*arm)
            run = (plain if arm is None else ours).generate(prompts, batch, args.tokens)
            answers[name] = run.answers
            per_step[name] = run.tokens / run.steps / batch
            if round_:
                rates[name].append(run.tokens / run.seconds)
    ratios = {name: sorted(a / b for a, b in zip(rates[name], rates["plain"], strict=True)) for name in ARMS}
    del ratios["plain"]
    row: dict = {
        "batch": batch,
        "tokens_per_second": {name: round(statistics.median(r), 2) for name, r in rates.items()},
        "ratio": {name: round(statistics.median(r), 3) for name, r in ratios.items()},
        "spread": {name: [round(r[0], 3), round(r[-1], 3)] for name, r in ratios.items()},
        "plain_spread": round(max(rates["plain"]) / min(rates["plain"]), 3),
        "tokens_per_step": {name: round(t, 3) for name, t in per_step.items()},
        "identical": all(a == answers["plain"] for a in answers.values()),
    }
    # Within each round, so that what slows the whole machine cancels out.
    shares = [rates["auto"][i] / max(rates[name][i] for name in ARMS) for i in range(args.rounds)]
    best = max((n for n in ARMS if n != "auto"), key=lambda name: row["ratio"].get(name, 1.0))
    row["best_other"] = best
    row["auto_of_best"] = round(row["ratio"]["auto"] / row["ratio"].get(best, 1.0), 3)
    row["auto_of_the_rounds_best"] = round(statistics.median(shares), 3)
    cells = "  ".join(f"{name} {row['ratio'][name]:.2f}" for name in ratios)
    cells += f"; auto {row['auto_of_best']:.3f} of {best}; identical: {row['identical']}"
    print(f"batch {batch}: {cells}", flush=True)
    return row


def traffic(ours: Arms, kinds: dict[str, list[list[int]]], steps: int) -> list[dict]:
    """Code, stories and code again at batch 1: what auto verified and what came of it, step by step."""
    ours.policy("auto")
    records: list[dict] = []
    for phase, kind in enumerate(("code", "story", "code", "story")):
        done = 0
        while done < steps:
            run = ours.generate(kinds[kind], 1, 100, trace=True)
            before = 0.0
            for record in run.trace:
                gained = record["tokens"] - before if record["tokens"] > before else record["tokens"]
                before = record["tokens"]
                records.append({"phase": phase, "kind": kind, "draft_tokens": record["draft_tokens"], "gained": gained})
            done += len(run.trace)
    return records


def controller_cost() -> float:
    """Median microseconds per step of the controller alone: 32 requests, four draft tokens each."""
    import numpy as np

    from freedraft.cost.controller import Auto
    from freedraft.cost.hardware import HardwareProfile
    from freedraft.cost.model_shape import ModelShape
    from freedraft.cost.roofline import Roofline
    from freedraft.draft import DraftBatch
    from freedraft.step import Step

    shape = ModelShape(hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocab=49152)
    now = [0.0]  # the clock that the controller reads: steps of 50 ms
    roofline = Roofline(shape, HardwareProfile.load("cpu"))
    control = Auto(roofline, MAX_DRAFT_TOKENS, clock=lambda: now[0])
    batch, nodes = 32, 5
    draft = DraftBatch.empty(batch, nodes)
    draft.counts[:] = nodes
    draft.depths[:] = np.arange(nodes)
    draft.parents[:] = np.arange(nodes) - 1
    draft.tokens[:] = np.arange(nodes)
    rng = np.random.default_rng(0)
    draft.scores[:] = np.cumprod(rng.uniform(0.3, 0.9, (batch, nodes)), axis=1)
    draft.scores[:, 0] = 1.0
    ids, source = [f"{i}" for i in range(batch)], np.tile(np.arange(1, nodes + 1, dtype=np.int32), batch)
    starts, whole = np.arange(batch, dtype=np.int64) * nodes, np.full(batch, nodes - 1, np.int32)
    contexts = np.full(batch, 300, np.int32)
    times = []
    for i in range(3000):
        ends, previous = starts + 1 + i % 3, (batch, 64 + i % 32)
        step = Step(ids, source, starts, ends, contexts, whole, whole, None, previous, lambda b: source)
        began = time.perf_counter()
        control.update(step)
        control.max_draft_len(step)
        control.truncate(draft)
        control.end(step)
        times.append(time.perf_counter() - began)
        now[0] += 0.05
        draft.counts[:] = nodes
    return statistics.median(times[500:]) * 1e6


def plot(result: dict, path: Path) -> None:
    """Ratio to plain by batch size, and how auto follows a change of traffic."""
    from bench.lib.plots import budget_lines, plt

    both = "traffic" in result
    figure, axes = plt.subplots(1, 1 + both, figsize=(6 + 6 * both, 4.2), layout="constrained", squeeze=False)
    budget_lines(axes[0, 0], result["rows"])
    axes[0, 0].set(title="Throughput over plain vLLM, prompts of four kinds", ylim=(0, None))
    if both:
        right, window = axes[0, 1], 25
        records = result["traffic"]
        for field, label in (("draft_tokens", "draft tokens verified"), ("gained", "tokens gained")):
            values = [r[field] for r in records]
            smooth = [statistics.mean(values[max(0, i - window + 1) : i + 1]) for i in range(len(values))]
            right.plot(smooth, label=label)
        for i in range(1, len(records)):
            if records[i]["phase"] != records[i - 1]["phase"]:
                right.axvline(i, color="black", lw=1, ls=":")
        for phase in sorted({r["phase"] for r in records}):
            at = [i for i, r in enumerate(records) if r["phase"] == phase]
            right.text(statistics.mean(at), right.get_ylim()[1] * 0.97, records[at[0]]["kind"], ha="center", va="top")
        right.set(
            title=f"Traffic that changes, batch 1 (mean of {window} steps)", xlabel="step", ylabel="tokens per step"
        )
        right.legend(loc="upper right", bbox_to_anchor=(1.0, 0.92))
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
