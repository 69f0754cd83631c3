"""Policies of the draft budget by replay: recorded answers, and machines whose step times are known.

A full batch of recorded answers is decoded step by step; what a draft gets accepted is read off the recording, and a
step takes what the machine's table says, times a random factor that the policies do not know. The same on every
computer, so differences of a percent mean something; what it leaves out is everything that a real engine does besides.

    python bench/budget_replay.py --trace FILE --tokenizer build/model --json build/budget-replay.json

Machines: `cpu` is vLLM on two cores with SmolLM2-135M in fp32, as timed there; `h200` is the roofline of an 8B model on
an H200 of which computing reaches 60 % of its peak, so that the controller's own roofline is wrong about it.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.lib.results import write_json
from bench.lib.trace import Trace
from bench.replay import build_store, test_rows
from freedraft.cost.controller import Auto
from freedraft.cost.hardware import HardwareProfile
from freedraft.cost.model_shape import ModelShape
from freedraft.cost.policies import Controller, Fixed, Knee
from freedraft.cost.roofline import Roofline
from freedraft.step import Step
from sssd_plugin.drafter import Drafter

ARMS: dict[str, tuple[str, int]] = {
    "plain": ("fixed", 0),
    "fixed 2": ("fixed", 2),
    "fixed 4": ("fixed", 4),
    "fixed 8": ("fixed", 8),
    "knee": ("knee", 8),
    "auto": ("auto", 8),
}
NOISE = 0.08
SMALL = ModelShape(
    hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocab=49152,
    weight_bytes=4, activation_bytes=4, kv_bytes=4, dtype="float32",
)  # fmt: skip
LARGE = ModelShape(hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256)
StepTime = Callable[[int, int], float]


def cpu(batch: int, query_tokens: int) -> float:
    """Milliseconds as measured with one request, by query tokens; beyond nine, 0.9 ms each; 0.3 ms per request."""
    at = np.interp(query_tokens, [1, 2, 3, 5, 6, 7, 9], [20.4, 21.7, 22.3, 22.6, 23.3, 24.5, 25.1])
    return 1e-3 * (float(at) + 0.9 * max(0, query_tokens - 9) + 0.3 * (batch - 1))


def h200(batch: int, query_tokens: int) -> float:
    """The roofline at 60 % of the peak, and 0.8 ms that no roofline knows of."""
    profile = HardwareProfile.load("h200")
    slower = profile.model_copy(update={"peak_flops": 0.6 * profile.peak_flops})
    return 0.0008 + float(Roofline(LARGE, slower).seconds(batch, query_tokens, 600))


MACHINES: dict[str, tuple[StepTime, ModelShape, str, float]] = {
    "cpu": (cpu, SMALL, "cpu", 40e-6),
    "h200": (h200, LARGE, "h200", 40e-6),
}


class Replay:
    """A batch of recorded answers that is always full, until all of them are done."""

    def __init__(self, rows: list, batch: int) -> None:
        self.rows, self.batch = rows, batch

    def run(self, arm: str, machine: str, drafter: Drafter, seed: int) -> float:
        """Tokens per second."""
        seconds_of, shape, profile_name, drafting = MACHINES[machine]
        seconds_of = functools.cache(seconds_of)
        profile = HardwareProfile.load(profile_name)
        policy, max_draft_tokens = ARMS[arm]
        now = 0.0
        controller: Controller = {
            "fixed": lambda: Fixed(profile, max_draft_tokens),
            "knee": lambda: Knee(profile, max_draft_tokens),
            "auto": lambda: Auto(Roofline(shape, profile), max_draft_tokens, clock=lambda: now),
        }[policy]()
        min_score = profile.token_cost if policy == "knee" else 0.0
        rng = np.random.default_rng(seed)
        waiting = list(range(len(self.rows)))[::-1]
        names: list[str] = []
        prompts, truth, done = [], [], []
        longest = max(len(p) + len(o) for p, o in self.rows) + 1
        table = np.zeros((self.batch, longest), np.int32)
        row_of = list(range(self.batch))[::-1]
        places: list[int] = []
        gained, drafted = np.zeros(0, np.int64), np.zeros(0, np.int32)
        produced, query_tokens, changed = 0, 0, True
        while True:
            while waiting and len(names) < self.batch:
                i = waiting.pop()
                prompt, output = self.rows[i]
                place = row_of.pop()
                table[place, : len(prompt)] = prompt
                table[place, len(prompt)] = output[0]
                names.append(f"{i}")
                prompts.append(len(prompt))
                truth.append(output)
                done.append(1)
                places.append(place)
                gained = np.append(gained, 1)
                changed = True
            if not names:
                return produced / now
            n = len(names)
            drafted = np.append(drafted, np.zeros(n - len(drafted), np.int32))
            lengths = np.array([p + d for p, d in zip(prompts, done, strict=True)], np.int32)
            rows = np.array(places, np.int32)
            counts, drafts = np.ones(n, np.int32), None
            ends = rows * np.int64(longest) + lengths
            step = Step(
                list(names), table.reshape(-1), ends - gained, ends, np.full(n, 600, np.int32),
                np.full(n, max_draft_tokens, np.int32), drafted, None, None if changed else (n, query_tokens),
                lambda b: table[places[b]],
            )  # fmt: skip
            controller.update(step)
            if max_draft_len := controller.max_draft_len(step):
                for b in drafter.update(names, step.tokens, step.starts, step.ends, lengths):
                    drafter.replace(names[b], table[rows[b], : lengths[b]])
                drafts = drafter.draft(names, max_nodes=max_draft_len + 1, shape="chain", min_score=min_score)
                controller.truncate(drafts)
                counts = drafts.counts
                now += drafting * n
            controller.end(step)
            drafted = np.maximum(counts, 1) - 1
            query_tokens = int(np.maximum(counts, 1).sum())
            now += seconds_of(n, query_tokens) * rng.lognormal(0.0, NOISE)
            changed = False
            for b in range(n):
                answer, at = truth[b], done[b]
                drafted_tokens = drafts.tokens[b, 1 : counts[b]] if drafts is not None else answer[:0]
                known = answer[at : at + len(drafted_tokens)]
                new = min(1 + int((drafted_tokens[: len(known)] == known).cumprod().sum()), len(answer) - at)
                table[places[b], prompts[b] + at : prompts[b] + at + new] = answer[at : at + new]
                gained[b], done[b] = new, at + new
                produced += new
            over = [b for b in range(n) if done[b] >= len(truth[b])]
            if over:
                drafter.finish(names[b] for b in over)
                for b in reversed(over):
                    row_of.append(places[b])
                    for column in (names, prompts, truth, done, places):
                        del column[b]
                gained, drafted = np.delete(gained, over), np.delete(drafted, over)
                changed = True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--machines", nargs="*", choices=list(MACHINES), default=list(MACHINES))
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 2, 4, 8, 16, 64, 256])
    parser.add_argument("--rows", type=int, default=199, help="answers that are replayed")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    trace = Trace.load(args.trace, args.tokenizer)
    snapshot, rows = build_store(trace), test_rows(trace)[: args.rows]
    drafter = Drafter(vocab_size=trace.vocab_size, max_nodes=9, snapshot=snapshot)
    result: list[dict] = []
    for machine in args.machines:
        for batch in args.batches:
            # Small batches see fewer answers, so that all take about as many steps.
            replay = Replay(rows[: max(12, min(len(rows), 4 * batch))], batch)
            rates = {arm: replay.run(arm, machine, drafter, seed=batch) for arm in ARMS}
            best = max(rate for arm, rate in rates.items() if arm != "auto")
            row = {
                "machine": machine,
                "batch": batch,
                "ratio": {arm: round(rate / rates["plain"], 3) for arm, rate in rates.items()},
                "auto_of_best": round(rates["auto"] / best, 3),
            }
            result.append(row)
            cells = "  ".join(f"{arm} {ratio:.2f}" for arm, ratio in row["ratio"].items() if arm != "plain")
            print(f"{machine:5} batch {batch:3}: {cells}; auto {row['auto_of_best']:.3f} of the best other", flush=True)
    write_json(args.json, {"trace": args.trace.name, "noise": NOISE, "rows": result}, data=[args.trace])


if __name__ == "__main__":
    main()
