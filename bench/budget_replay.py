"""Policies of the draft budget by replay: recorded answers on simulated machines with known step times.

A full batch of recorded answers is decoded step by step. The recording decides which draft tokens are accepted; the
machine's table, times a random factor that the policies do not know, gives the step time. Results are the same on every
computer, so differences of a percent are meaningful.

    python bench/budget_replay.py --trace FILE --tokenizer build/model --json build/budget-replay.json

Machines: `cpu` is vLLM on two cores with SmolLM2-135M in fp32, as measured; `h200` is the roofline of an 8B model on an
H200 that reaches 60 % of its peak compute, so that the controller's own roofline is wrong about it.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.lib.machine import rounded
from bench.lib.results import write_json
from bench.lib.trace import Row, Trace
from freedraft.cost.auto import Auto
from freedraft.cost.controller import Controller, FullLength, Knee
from freedraft.cost.hardware import HardwareProfile
from freedraft.cost.measured import Measured
from freedraft.cost.model_shape import ModelShape
from freedraft.cost.roofline import Roofline
from freedraft.step import Step
from sssd_plugin.drafter import Drafter

NOISE, CONTEXT, DRAFTING = 0.08, 600, 40e-6  # relative, of step times; tokens per request; seconds to draft per request
ANSWERS = 199  # maximum number to replay
BATCHES = (1, 2, 4, 8, 16, 64, 256)
SMALL = ModelShape(
    hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocab=49152,
    weight_bytes=4, activation_bytes=4, kv_bytes=4, dtype="float32",
)  # fmt: skip
LARGE = ModelShape(hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256)


def cpu(batch: int, query_tokens: int) -> float:
    """Seconds of a step as measured with one request; 0.9 ms per query token beyond nine, 0.3 ms per request."""
    at = np.interp(query_tokens, [1, 2, 3, 5, 6, 7, 9], [20.4, 21.7, 22.3, 22.6, 23.3, 24.5, 25.1])
    return 1e-3 * (float(at) + 0.9 * max(0, query_tokens - 9) + 0.3 * (batch - 1))


def h200(batch: int, query_tokens: int) -> float:
    """Seconds of a step by the roofline at 60 % of the peak, plus 0.8 ms that no roofline includes."""
    profile = HardwareProfile.load("h200")
    slower = profile.model_copy(update={"peak_flops": 0.6 * profile.peak_flops})
    return 0.0008 + float(Roofline(LARGE, slower).seconds(batch, query_tokens, CONTEXT))


MACHINES: dict[str, tuple[Callable[[int, int], float], ModelShape]] = {"cpu": (cpu, SMALL), "h200": (h200, LARGE)}
"""Seconds of a step by batch size and query tokens; the model. Policies get the hardware profile of that name."""


MakePolicy = Callable[[Roofline, Callable[[], float]], Controller]


def fixed(length: int) -> MakePolicy:
    return lambda roofline, clock: FullLength(roofline.profile, length)


ARMS: dict[str, MakePolicy] = {"plain": fixed(0)} | {f"fixed {n}": fixed(n) for n in (2, 4, 8)}
ARMS["knee"] = lambda roofline, clock: Knee(roofline.profile, 8)
ARMS["auto"] = lambda roofline, clock: Auto(roofline.profile, 8, None, Measured(roofline, clock=clock))
ROWS = (64, 96, 128, 160, 288)  # query tokens of a step of 32 requests: as many for each, or the best over the batch


@dataclass(eq=False)
class Answer:
    """A recorded answer during decoding; its tokens are in row `place` of a table."""

    name: str
    place: int
    prompt: int
    truth: NDArray[np.int32]
    done: int = 1
    gained: int = 1
    drafted: int = 0


def replay(rows: Sequence[Row], batch: int, machine: str, drafter: Drafter, make: MakePolicy) -> tuple[float, float]:
    """Decode recorded answers in a batch that is kept full while answers are left; return the tokens per second, and
    the accepted draft tokens per step and request."""
    (seconds_of, shape), now = MACHINES[machine], 0.0
    policy = make(Roofline(shape, HardwareProfile.load(machine)), lambda: now)
    rng = np.random.default_rng(batch)
    waiting, free = list(range(len(rows)))[::-1], list(range(batch))[::-1]
    longest = max(len(p) + len(o) for p, o in rows) + 1
    table = np.zeros((batch, longest), np.int32)
    answers: list[Answer] = []
    produced, steps, query_tokens, changed = 0, 0, 0, True
    while True:
        while waiting and len(answers) < batch:
            i, place = waiting.pop(), free.pop()
            prompt, output = rows[i]
            table[place, : len(prompt)], table[place, len(prompt)] = prompt, output[0]
            answers.append(Answer(f"{i}", place, len(prompt), output))
        if not answers:
            return produced / now, produced / steps - 1
        n, names, places = len(answers), [a.name for a in answers], [a.place for a in answers]
        lengths = np.array([a.prompt + a.done for a in answers], np.int32)
        ends = np.array(places) * np.int64(longest) + lengths
        starts = ends - np.array([a.gained for a in answers])
        step = Step(
            names, table.reshape(-1), starts, ends, np.full(n, CONTEXT, np.int32),
            np.full(n, drafter.max_nodes - 1, np.int32), np.array([a.drafted for a in answers], np.int32),
            None if changed else (n, query_tokens), lambda b: table[places[b]],  # noqa: B023 - called in this step only
            np.zeros(n, np.bool_),
        )  # fmt: skip

        policy.learn(step)
        counts, tokens = np.ones(n, np.int32), np.zeros((n, 1), np.int32)
        if length := policy.plan(step):
            for b in drafter.update(names, step.tokens, step.starts, step.ends, lengths):
                drafter.replace(names[b], step.history(b)[: lengths[b]])
            now += DRAFTING * n
            drafts = drafter.draft(names, max_nodes=length + 1, shape="chain")
            policy.cut(drafts)
            counts, tokens = np.maximum(drafts.counts, 1), drafts.tokens
        policy.done(step)
        query_tokens = int(counts.sum())
        now += seconds_of(n, query_tokens) * rng.lognormal(0.0, NOISE)
        for a, count, row in zip(answers, counts.tolist(), tokens, strict=True):
            left = a.truth[a.done :]
            known = left[: count - 1]
            a.gained = min(1 + int((row[1 : 1 + len(known)] == known).cumprod().sum()), len(left))
            table[a.place, a.prompt + a.done :][: a.gained] = left[: a.gained]
            a.drafted, a.done = count - 1, a.done + a.gained
            produced, steps = produced + a.gained, steps + 1
        over = [a for a in answers if a.done >= len(a.truth)]
        drafter.finish(a.name for a in over)
        free += [a.place for a in reversed(over)]
        answers, changed = [a for a in answers if a not in over], bool(over)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    trace, result = Trace.load(args.trace, args.tokenizer), list[dict[str, Any]]()
    drafter = Drafter(vocab_size=trace.vocab_size, max_nodes=9, snapshot=trace.snapshot)
    for machine in MACHINES:
        for batch in BATCHES:
            # Small batches get fewer answers, so that all take about the same number of steps.
            shown = trace.test_rows[: max(12, min(ANSWERS, 4 * batch))]
            rates = {arm: replay(shown, batch, machine, drafter, make)[0] for arm, make in ARMS.items()}
            best = max(rate for arm, rate in rates.items() if arm != "auto")
            ratios = {arm: rate / rates["plain"] for arm, rate in rates.items()}
            row = {"machine": machine, "batch": batch, "ratio": ratios, "auto_of_best": rates["auto"] / best}
            result.append(rounded(row, 3))
            print(result[-1], flush=True)

    def accepted(make: MakePolicy) -> float:
        return round(replay(trace.test_rows[:ANSWERS], 32, "h200", drafter, make)[1], 3)

    knees = {rows: lambda roofline, clock, rows=rows: Knee(roofline.profile, 8, knee=rows) for rows in ROWS}
    kept = [{"rows": n, "uniform": accepted(fixed(n // 32 - 1)), "by score": accepted(knees[n])} for n in ROWS]
    print(*kept, sep="\n")
    figures = {"trace": args.trace.name, "noise": NOISE, "rows": result, "accepted of 32 requests": kept}
    write_json(args.json, figures, data=[args.trace])


if __name__ == "__main__":
    main()
