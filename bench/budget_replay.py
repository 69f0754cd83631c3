"""Policies of the draft budget by replay: recorded answers, and machines with known step times.

A full batch of recorded answers is decoded step by step; what a draft gets accepted is read off the recording, and a
step takes what the machine's table says, times a random factor that the policies do not know. The same on every
computer, so differences of a percent mean something; what it leaves out is everything that a real engine does besides.

    python bench/budget_replay.py --trace FILE --tokenizer build/model --json build/budget-replay.json

Machines: `cpu` is vLLM on two cores with SmolLM2-135M in fp32, as timed there; `h200` is the roofline of an 8B model on
an H200 of which computing reaches 60 % of its peak, so that the controller's own roofline is wrong about it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from bench.lib.machine import rounded
from bench.lib.results import write_json
from bench.lib.trace import Row, Trace
from freedraft.cost.controller import Auto
from freedraft.cost.hardware import HardwareProfile
from freedraft.cost.model_shape import ModelShape
from freedraft.cost.policies import Controller, Fixed, Knee
from freedraft.cost.roofline import Roofline
from freedraft.step import Step
from sssd_plugin.drafter import Drafter

ARMS = {"plain": ("fixed", 0)} | {f"fixed {n}": ("fixed", n) for n in (2, 4, 8)}
ARMS |= {"knee": ("knee", 8), "auto": ("auto", 8)}
"""Policy and draft tokens at most."""
NOISE = 0.08
ROWS = 199  # answers that are replayed
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


@dataclass(eq=False)
class Answer:
    """A recorded answer that is being decoded; its tokens are those of row `place` of a table."""

    name: str
    place: int
    prompt: int
    truth: NDArray[np.int32]
    done: int = 1
    gained: int = 1
    drafted: int = 0


def replay(rows: list[Row], batch: int, arm: str, machine: str, drafter: Drafter) -> float:
    """Tokens per second of a batch of recorded answers that is always full, until all of them are done."""
    seconds_of, shape, profile_name, drafting = MACHINES[machine]
    profile = HardwareProfile.load(profile_name)
    policy, max_draft_tokens = ARMS[arm]
    now = 0.0
    controller: Controller = {
        "fixed": lambda: Fixed(profile, max_draft_tokens),
        "knee": lambda: Knee(profile, max_draft_tokens),
        "auto": lambda: Auto(Roofline(shape, profile), max_draft_tokens, clock=lambda: now),
    }[policy]()
    min_score = profile.token_cost if policy == "knee" else 0.0
    rng = np.random.default_rng(batch)
    waiting, free = list(range(len(rows)))[::-1], list(range(batch))[::-1]
    longest = max(len(p) + len(o) for p, o in rows) + 1
    table = np.zeros((batch, longest), np.int32)
    answers: list[Answer] = []
    produced, query_tokens, changed = 0, 0, True
    while True:
        while waiting and len(answers) < batch:
            i, place = waiting.pop(), free.pop()
            prompt, output = rows[i]
            table[place, : len(prompt)], table[place, len(prompt)] = prompt, output[0]
            answers.append(Answer(f"{i}", place, len(prompt), output))
        if not answers:
            return produced / now
        n, names, places = len(answers), [a.name for a in answers], [a.place for a in answers]
        lengths = np.array([a.prompt + a.done for a in answers], np.int32)
        ends = np.array(places) * np.int64(longest) + lengths
        starts = ends - np.array([a.gained for a in answers])
        drafted = np.array([a.drafted for a in answers], np.int32)
        step = Step(
            names, table.reshape(-1), starts, ends, np.full(n, 600, np.int32), np.full(n, max_draft_tokens, np.int32),
            drafted, None, None if changed else (n, query_tokens), lambda b: table[places[b]],  # noqa: B023 - called in this step only
        )  # fmt: skip
        controller.update(step)
        counts, tokens = np.ones(n, np.int32), np.zeros((n, 1), np.int32)
        if max_draft_len := controller.max_draft_len(step):
            for b in drafter.update(names, step.tokens, starts, ends, lengths):
                drafter.replace(names[b], table[places[b], : lengths[b]])
            drafts = drafter.draft(names, max_nodes=max_draft_len + 1, shape="chain", min_score=min_score)
            controller.truncate(drafts)
            counts, tokens = np.maximum(drafts.counts, 1), drafts.tokens
            now += drafting * n
        controller.end(step)
        query_tokens = int(counts.sum())
        now += seconds_of(n, query_tokens) * rng.lognormal(0.0, NOISE)
        for a, count, row in zip(answers, counts.tolist(), tokens, strict=True):
            left = a.truth[a.done :]
            known = left[: count - 1]
            a.gained = min(1 + int((row[1 : 1 + len(known)] == known).cumprod().sum()), len(left))
            table[a.place, a.prompt + a.done :][: a.gained] = left[: a.gained]
            a.drafted, a.done = count - 1, a.done + a.gained
            produced += a.gained
        over = [a for a in answers if a.done >= len(a.truth)]
        drafter.finish(a.name for a in over)
        free += [a.place for a in reversed(over)]
        answers, changed = [a for a in answers if a not in over], bool(over)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 2, 4, 8, 16, 64, 256])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    trace = Trace.load(args.trace, args.tokenizer)
    snapshot, rows = trace.snapshot, trace.test_rows[:ROWS]
    drafter = Drafter(vocab_size=trace.vocab_size, max_nodes=9, snapshot=snapshot)
    result: list[dict] = []
    for machine in MACHINES:
        for batch in args.batches:
            # Small batches see fewer answers, so that all take about as many steps.
            shown = rows[: max(12, min(len(rows), 4 * batch))]
            rates = {arm: replay(shown, batch, arm, machine, drafter) for arm in ARMS}
            best = max(rate for arm, rate in rates.items() if arm != "auto")
            ratios = {arm: rate / rates["plain"] for arm, rate in rates.items()}
            row = {"machine": machine, "batch": batch, "ratio": ratios, "auto_of_best": rates["auto"] / best}
            result.append(rounded(row, 3))
            print(result[-1], flush=True)
    write_json(args.json, {"trace": args.trace.name, "noise": NOISE, "rows": result}, data=[args.trace])


if __name__ == "__main__":
    main()
