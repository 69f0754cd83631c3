"""Content that changes under `policy: auto`, by the step times of an 8B model on an H200: from text of which all drafts
are accepted to text of which none is, and back, whatever the drafter promises of it."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import pytest
from known import LLAMA3_8B

from freedraft.cost.batch_lengths import BatchLengths, candidate_lengths
from freedraft.cost.controller import Auto
from freedraft.cost.hardware import HardwareProfile
from freedraft.cost.model_shape import ModelShape
from freedraft.cost.policies import Controller
from freedraft.cost.roofline import Roofline
from freedraft.draft import DraftBatch
from freedraft.method import Method
from freedraft.step import EngineContext, Step
from tests.support.steps import make_step

ROOFLINE = Roofline(ModelShape.from_config(LLAMA3_8B, dtype="bfloat16"), HardwareProfile.load("h200"))
MOST, LAG = 32, 2  # draft tokens; steps until an asynchronous scheduler has heard of what a step says
DRAFTING = 30e-6  # seconds of a request's draft


class Text(NamedTuple):
    """accept: share of tokens that are accepted behind accepted ones; promised: what the drafter says of it."""

    accept: float
    promised: float


ALL, NONE, NONE_AND_KNOWN = Text(0.99, 0.95), Text(0.0, 0.95), Text(0.0, 0.05)


def seconds(batch: int, length: int) -> float:
    """As measured at batch 1: 5.05 ms without drafts, 6.7 ms with 8 and 7.4 ms with 32 draft tokens."""
    return 1e-3 * (5.0 + 0.05 * batch + (1.417 + 0.0292 * batch * length if length else 0.0))


class Drafter(Method):
    """Draft i of a chain is token i; `machine` says what such a chain promises, and what a draft takes."""

    def __init__(self, controller: Controller, machine: Machine) -> None:
        super().__init__(None, EngineContext(max_draft_tokens=MOST), controller, "sssd")
        self.machine = machine

    def propose(self, step: Step, max_draft_len: int) -> DraftBatch:
        batch = step.batch_size
        draft = DraftBatch.empty(batch, MOST + 1)
        draft.counts[:] = max_draft_len + 1
        draft.tokens[:] = draft.depths[:] = np.arange(MOST + 1)
        draft.parents[:] = draft.depths - 1
        draft.scores[:] = self.machine.text.promised**draft.depths
        self.machine.now += batch * DRAFTING
        return draft


class Machine:
    """A clock, and the steps of an engine. Drafts' times are in `seconds`, as measured, but for those besides."""

    def __init__(self) -> None:
        self.now, self.text, self.random = 100.0, ALL, np.random.default_rng(7)

    def clock(self) -> float:
        return self.now

    def step(self, batch: int, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Tokens that each request gains by a step, and how many of its draft were right, verified or not."""
        self.now += seconds(batch, int(lengths.sum()) / batch) * self.random.lognormal(0, 0.02)
        right = np.cumprod(self.random.random((batch, MOST)) < self.text.accept, axis=1).sum(axis=1)
        return 1 + np.minimum(right, lengths), right


def gained_step(
    ids: list[str], gained: np.ndarray, right: np.ndarray, most: int, previous: tuple[int, int] | None = None
) -> Step:
    """The tokens of a step: those of the draft while they were right, then another one."""
    rows = [[*range(1, n + 1)] if n <= r else [*range(1, n), 999] for n, r in zip(gained, right, strict=True)]
    return make_step(ids, rows, capacities=most, previous=previous)


class RunnerV1:
    """An engine that drafts before it decides how much."""

    def __init__(self) -> None:
        self.machine = Machine()
        self.method = Drafter(Auto(ROOFLINE, MOST, clock=self.machine.clock), self.machine)

    def run(self, batch: int, text: Text, steps: int) -> np.ndarray:
        """float64 [steps, 3]: tokens, seconds and draft tokens of each."""
        machine, ids, rows = self.machine, [f"{batch} {text} {i}" for i in range(batch)], []
        machine.text = text
        gained, right, previous = np.ones(batch, int), np.zeros(batch, int), None
        for _ in range(steps):
            began = machine.now
            lengths = self.method.draft(gained_step(ids, gained, right, MOST, previous)).counts - 1
            gained, right = machine.step(batch, lengths)
            previous = batch, batch + int(lengths.sum())
            rows.append((gained.sum(), machine.now - began, lengths.sum()))
        return np.array(rows, float)


class RunnerV2:
    """An engine that decides the length of drafts by the batch's size, some steps before it asks for them."""

    def __init__(self) -> None:
        self.machine = Machine()
        self.lengths = BatchLengths(ROOFLINE, candidate_lengths(MOST), clock=self.machine.clock)
        self.method = Drafter(self.lengths, self.machine)
        self.table, self.sent = [8] * 65, deque([[]] * LAG)

    def run(self, batch: int, text: Text, steps: int) -> np.ndarray:
        """float64 [steps, 3]: tokens, seconds and draft tokens of each."""
        machine, ids, rows = self.machine, [f"{batch} {text} {i}" for i in range(batch)], []
        machine.text = text
        gained, right = np.ones(batch, int), np.zeros(batch, int)
        for _ in range(steps):
            began, length = machine.now, self.table[batch]
            step = gained_step(ids, gained, right, length)
            if length:
                self.method.draft(step)
                machine.now = began  # what it takes is in the step's time
            else:
                self.method.observe(step)
            now = machine.now
            gained, right = machine.step(batch, np.full(batch, length))
            self.lengths.record_step(batch, batch * (1 + length), 300.0, machine.now - now)
            self.sent.append(self.lengths.decide(batch, 300.0))
            for first, last, chosen in self.sent.popleft():
                self.table[first : last + 1] = [chosen] * len(self.table[first : last + 1])
            rows.append((gained.sum(), machine.now - began, batch * length))
        return np.array(rows, float)


def best_rate(batch: int, text: Text) -> float:
    """Tokens per second of the best length of all, always the same."""
    tokens = {n: sum(text.accept**i for i in range(n + 1)) for n in candidate_lengths(MOST)}
    return max(batch * tokens[n] / seconds(batch, n) for n in tokens)


def of_best(rows: np.ndarray, batch: int, text: Text) -> float:
    return float(rows[:, 0].sum() / rows[:, 1].sum()) / best_rate(batch, text)


@pytest.mark.parametrize("runner", [RunnerV1, RunnerV2])
@pytest.mark.parametrize("none", [NONE, NONE_AND_KNOWN])
def test_where_nothing_is_accepted_any_more_steps_are_soon_plain(runner: type, none: Text) -> None:
    served = runner()
    for batch in (1, 8, 32):
        served.run(batch, ALL, 600)
    rows = served.run(1, none, 400)
    assert of_best(rows[:200], 1, none) >= 0.97 and of_best(rows[200:], 1, none) >= 0.985


@pytest.mark.parametrize("none", [NONE, NONE_AND_KNOWN])
@pytest.mark.parametrize("batch", [1, 8, 12, 32])
def test_drafts_that_are_accepted_again_are_soon_made(none: Text, batch: int) -> None:
    served = RunnerV2()
    for text in (ALL, none, ALL, none, ALL):
        rows = served.run(batch, text, 400 if text == none else 200)
        assert of_best(rows[50:], batch, text) >= 0.95, text


def test_the_same_where_drafts_come_first() -> None:
    served = RunnerV1()
    for text in (ALL, NONE, ALL, NONE, ALL):
        rows = served.run(1, text, 400 if text == NONE else 200)
        assert of_best(rows[50:], 1, text) >= 0.95, text
