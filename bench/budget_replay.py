"""Policies of the draft budget by replay: recorded answers on simulated machines with known step times.

A full batch of recorded answers is decoded step by step. The recording decides which draft tokens are accepted; the
machine's table, times a random factor that the policies do not know, gives the step time. Results are the same on every
computer, so differences of a percent are meaningful.

    python bench/budget_replay.py --trace FILE --tokenizer build/model --json build/budget-replay.json
    python bench/budget_replay.py --trace FILE --sessions FILE --tokenizer build/model --lengths 8 16 32 64 --json ...

The second command compares maximum draft lengths under policy `auto`, over answers and sessions: on V1, which may draft
any number of tokens up to the maximum, and on V2, which selects one of few lengths by the batch size before it drafts.

Machines: `cpu` is vLLM on two cores with SmolLM2-135M in fp32, as measured; `h200` is the roofline of an 8B model on an
H200 that reaches 60 % of its peak compute, so that the controller's own roofline is wrong about it.
"""

import argparse
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.lib.machine import rounded
from bench.lib.results import write_json
from bench.lib.trace import Row, Sessions, Trace
from freedraft.cost.batch_lengths import BatchLengths, Rows, candidate_lengths
from freedraft.cost.controller import Auto
from freedraft.cost.hardware import HardwareProfile
from freedraft.cost.model_shape import ModelShape
from freedraft.cost.policies import Controller, Fixed, Knee
from freedraft.cost.roofline import Roofline
from freedraft.draft import DraftBatch
from freedraft.step import Step
from sssd_plugin.drafter import Drafter

NOISE, CONTEXT, DRAFTING = 0.08, 600, 40e-6  # relative, of step times; tokens per request; seconds to draft per request
ANSWERS, SESSIONS, TURNS = 199, 12, 48  # maximum numbers to replay
SCHEDULED_AHEAD = 2  # steps that V2's engine has scheduled before new lengths take effect
BATCHES = (1, 2, 4, 8, 16, 64, 256)
CELLS = (("h200", 1), ("h200", 8), ("h200", 32), ("cpu", 1), ("cpu", 4))  # machine and batch size, for --lengths
SMALL = ModelShape(
    hidden=576, layers=30, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocab=49152,
    weight_bytes=4, activation_bytes=4, kv_bytes=4, dtype="float32",
)  # fmt: skip
LARGE = ModelShape(hidden=4096, layers=32, heads=32, kv_heads=8, head_dim=128, intermediate=14336, vocab=128256)


class Clock:
    """Simulated time of a replay, in seconds."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


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


class V1:
    """Drafting on model runner V1: the policy decides at each step. min_score: minimum score of drafted nodes."""

    def __init__(self, policy: Controller) -> None:
        self._policy, self.min_score = policy, policy.profile.token_cost if isinstance(policy, Knee) else 0.0

    def draft(self, step: Step, drafter: Callable[[int], DraftBatch]) -> tuple[DraftBatch | None, int]:
        """Return the drafts to verify and the step's number of query tokens. drafter: drafts chains up to a length."""
        self._policy.update(step)
        draft, length = None, self._policy.max_draft_len(step)
        if length:
            draft = drafter(length)
            self._policy.truncate(draft)
        self._policy.end(step)
        return draft, step.batch_size if draft is None else int(np.maximum(draft.counts, 1).sum())

    def end(self, batch: int, query_tokens: int, following: int) -> None:
        """Record a finished step; `following` is the batch size of the next one."""


class V2:
    """Drafting on model runner V2: a schedule gives the draft length of a step by its batch size."""

    min_score = 0.0

    def __init__(self, lengths: BatchLengths, batch: int, clock: Clock) -> None:
        self._lengths, self._clock, self._began, self._steady = lengths, clock, 0.0, False
        self._schedule = [0, *(lengths.best(lengths.seconds(size, CONTEXT)) for size in range(1, batch + 1))]
        self._decided: deque[Rows] = deque([[]] * SCHEDULED_AHEAD)
        self._scheduled = deque([self._schedule[batch]] * SCHEDULED_AHEAD)

    def draft(self, step: Step, drafter: Callable[[int], DraftBatch]) -> tuple[DraftBatch | None, int]:
        """See `V1.draft`."""
        self._began, self._steady, length = self._clock(), step.previous is not None, self._scheduled.popleft()
        if length:
            step = replace(step, capacities=np.full(step.batch_size, length, np.int32))
            self._lengths.update(step)
            draft = drafter(self._lengths.max_draft_len(step))
            self._lengths.truncate(draft)
            return draft, step.batch_size * (1 + length)
        if asked := self._lengths.observe(step):
            self._lengths.look(drafter(asked))
            self._began = self._clock()
        return None, step.batch_size

    def end(self, batch: int, query_tokens: int, following: int) -> None:
        """See `V1.end`."""
        if self._steady:
            self._lengths.record_step(batch, query_tokens, CONTEXT, self._clock() - self._began)
        self._decided.append(self._lengths.decide(batch, CONTEXT))
        for first, last, length in self._decided.popleft():
            sizes = slice(first, min(last + 1, len(self._schedule)))
            self._schedule[sizes] = [length] * len(self._schedule[sizes])
        self._scheduled.append(self._schedule[following])


MakeRunner = Callable[[Roofline, int, Clock], V1 | V2]


def runner_of(name: str, most: int) -> MakeRunner:
    """Return a factory of V1 with policy "fixed", "knee" or "auto", or of "V2", with at most `most` draft tokens."""
    makers: dict[str, MakeRunner] = {
        "fixed": lambda roofline, batch, clock: V1(Fixed(roofline.profile, most)),
        "knee": lambda roofline, batch, clock: V1(Knee(roofline.profile, most)),
        "auto": lambda roofline, batch, clock: V1(Auto(roofline, most, clock=clock)),
        "V2": lambda roofline, batch, clock: V2(
            BatchLengths(roofline, candidate_lengths(most), clock=clock), batch, clock
        ),
    }
    return makers[name]


ARMS = {"plain": runner_of("fixed", 0)} | {f"fixed {n}": runner_of("fixed", n) for n in (2, 4, 8)}
ARMS |= {"knee": runner_of("knee", 8), "auto": runner_of("auto", 8)}


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


def replay(rows: Sequence[Row], batch: int, machine: str, drafter: Drafter, make: MakeRunner) -> float:
    """Decode recorded answers in a batch that is kept full while answers are left; return the tokens per second."""
    (seconds_of, shape), clock = MACHINES[machine], Clock()
    runner = make(Roofline(shape, HardwareProfile.load(machine)), batch, clock)
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
            return produced / clock.now
        n, names, places = len(answers), [a.name for a in answers], [a.place for a in answers]
        lengths = np.array([a.prompt + a.done for a in answers], np.int32)
        ends = np.array(places) * np.int64(longest) + lengths
        starts = ends - np.array([a.gained for a in answers])
        step = Step(
            names, table.reshape(-1), starts, ends, np.full(n, CONTEXT, np.int32),
            np.full(n, drafter.max_nodes - 1, np.int32), np.array([a.drafted for a in answers], np.int32), None,
            None if changed else (n, query_tokens), lambda b: table[places[b]],  # noqa: B023 - called in this step only
        )  # fmt: skip

        def draft(length: int, step: Step = step, lengths: NDArray[np.int32] = lengths) -> DraftBatch:
            for b in drafter.update(step.request_ids, step.tokens, step.starts, step.ends, lengths):
                drafter.replace(step.request_ids[b], step.history(b)[: lengths[b]])
            clock.now += DRAFTING * step.batch_size
            return drafter.draft(step.request_ids, max_nodes=length + 1, shape="chain", min_score=runner.min_score)

        drafts, query_tokens = runner.draft(step, draft)
        counts, tokens = np.ones(n, np.int32), np.zeros((n, 1), np.int32)
        if drafts is not None:
            counts, tokens = np.maximum(drafts.counts, 1), drafts.tokens
        clock.now += seconds_of(n, query_tokens) * rng.lognormal(0.0, NOISE)
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
        runner.end(n, query_tokens, max(1, len(answers)))


def of_policies(args: argparse.Namespace, trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield a row for each machine and batch size."""
    drafter = Drafter(vocab_size=trace.vocab_size, max_nodes=9, snapshot=trace.snapshot)
    for machine in MACHINES:
        for batch in BATCHES:
            # Small batches get fewer answers, so that all take about the same number of steps.
            shown = trace.test_rows[: max(12, min(ANSWERS, 4 * batch))]
            rates = {arm: replay(shown, batch, machine, drafter, make) for arm, make in ARMS.items()}
            best = max(rate for arm, rate in rates.items() if arm != "auto")
            ratios = {arm: rate / rates["plain"] for arm, rate in rates.items()}
            yield {"machine": machine, "batch": batch, "ratio": ratios, "auto_of_best": rates["auto"] / best}


def of_lengths(args: argparse.Namespace, trace: Trace) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind of traffic, machine, batch size and model runner."""
    of_sessions = Sessions.load(args.sessions, args.tokenizer).turns.values()
    turns = list(chain.from_iterable(islice(of_sessions, SESSIONS)))[:TURNS]
    chat, agent = (trace.test_rows[:ANSWERS], trace.snapshot, 12), (turns, (), 24)
    for traffic, (rows, snapshot, fewest) in {"chat": chat, "agent": agent}.items():
        drafters = [Drafter(vocab_size=trace.vocab_size, max_nodes=n + 1, snapshot=snapshot) for n in args.lengths]
        for machine, batch in CELLS:
            shown = rows[: max(fewest, min(len(rows), 4 * batch))]
            plain = replay(shown, batch, machine, drafters[0], ARMS["plain"])
            for runner, policy in (("V1", "auto"), ("V2", "V2")):
                each = zip(args.lengths, drafters, strict=True)
                rates = {n: replay(shown, batch, machine, d, runner_of(policy, n)) for n, d in each}
                ratios = {str(n): rate / plain for n, rate in rates.items()}
                yield {"runner": runner, "traffic": traffic, "machine": machine, "batch": batch, "ratio": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", help="numbers of draft tokens to compare, with --sessions")
    parser.add_argument("--sessions", type=Path)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    if bool(args.lengths) != bool(args.sessions):
        parser.error("--lengths and --sessions belong together")
    trace, result = Trace.load(args.trace, args.tokenizer), list[dict[str, Any]]()
    for row in (of_lengths if args.lengths else of_policies)(args, trace):
        result.append(rounded(row, 3))
        print(result[-1], flush=True)
    data = [path for path in (args.trace, args.sessions) if path]
    about = {"trace": args.trace.name, "noise": NOISE}
    write_json(args.json, about | {"rows": result}, data=data)


if __name__ == "__main__":
    main()
