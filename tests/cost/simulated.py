"""Engines of known step times, and text of which drafts are accepted with a known probability."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from known import ROOFLINE

from freedraft.cost.auto import Auto
from freedraft.cost.auto_by_batch import BatchLengths, candidate_lengths
from freedraft.cost.controller import Controller
from freedraft.cost.roofline import Roofline
from freedraft.draft import DraftBatch
from freedraft.method import Method
from freedraft.step import EngineContext, Step
from tests.support.steps import chains, make_step

LAG = 2  # steps until an asynchronous scheduler has heard of what a step says
Seconds = Callable[[int, int], float]  # of a step, by batch size and query tokens


class Text(NamedTuple):
    """accept: share of tokens that are accepted behind accepted ones; promised: what the drafter says of it."""

    accept: float
    promised: float = 0.5


class Drafter(Method):
    """Draft i of a chain is token i, as promised by the text of the engine."""

    def __init__(self, controller: Controller, engine: Engine) -> None:
        super().__init__(None, EngineContext(max_draft_tokens=engine.most), controller, "sssd")
        self.engine, self.proposed = engine, 0

    def propose(self, step: Step, max_draft_len: int) -> DraftBatch:
        self.proposed += 1
        self.engine.now += step.batch_size * self.engine.drafting
        return chains([[self.engine.text.promised] * max_draft_len] * step.batch_size)


class Engine:
    """most: draft tokens of a request; noise: of step times, as a share; drafting: seconds of a request's draft."""

    controller: Any

    def __init__(
        self, seconds: Seconds, roofline: Roofline = ROOFLINE, most: int = 8, *, noise: float = 0.02,
        drafting: float = 0.0, **options: Any,
    ) -> None:  # fmt: skip
        self.seconds, self.most, self.noise, self.drafting = seconds, most, noise, drafting
        self.now, self.text, self.random = 100.0, Text(0.0), np.random.default_rng(7)
        self.controller = self.make_controller(roofline, clock=lambda: self.now, **options)
        self.method = Drafter(self.controller, self)

    def run(self, batch: int, text: Text, steps: int) -> np.ndarray:
        """float64 [steps, 3]: tokens, seconds and draft tokens of each step."""
        self.text, rows, ids = text, [], [f"{batch} {text} {i}" for i in range(batch)]
        gained, right = np.ones(batch, int), np.zeros(batch, int)
        for _ in range(steps):
            # Tokens of the draft while they were right, verified or not, then another one.
            tokens = [[*range(1, n), n if n <= r else 999] for n, r in zip(gained, right, strict=True)]
            began = self.now
            lengths = self.draft(ids, tokens)
            drafted = int(lengths.sum())
            seconds = self.seconds(batch, batch + drafted) * self.random.lognormal(0, self.noise)
            self.now += seconds
            right = np.cumprod(self.random.random((batch, self.most)) < text.accept, axis=1).sum(axis=1)
            gained = 1 + np.minimum(right, lengths)
            self.end_step(batch, drafted, seconds)
            rows.append((gained.sum(), self.now - began, drafted))
        return np.array(rows, float)

    def rates(self, batch: int, text: Text) -> list[float]:
        """Tokens per second of each length that may be chosen, if it is always the same."""
        return [
            batch * sum(text.accept**i for i in range(n + 1)) / self.seconds(batch, batch * (1 + n))
            for n in self.lengths
        ]

    def of_best(self, rows: np.ndarray, batch: int, text: Text) -> float:
        """Tokens per second of these steps, as a share of those of the best fixed length."""
        return float(rows[:, 0].sum() / rows[:, 1].sum()) / max(self.rates(batch, text))


class V1(Engine):
    """Drafts before it decides how much."""

    previous: tuple[int, int] | None = None

    def make_controller(self, roofline: Roofline, **options: Any) -> Auto:
        self.lengths = range(self.most + 1)
        return Auto(roofline, self.most, **options)

    def draft(self, ids: list[str], gained: list[list[int]]) -> np.ndarray:
        if self.previous == (len(ids), len(ids)) and self.controller.rests():
            return np.zeros(len(ids), int)
        return self.method.draft(make_step(ids, gained, capacities=self.most, previous=self.previous)).counts - 1

    def end_step(self, batch: int, drafted: int, seconds: float) -> None:
        self.previous = batch, batch + drafted


class V2(Engine):
    """Decides the length of drafts by the batch's size, some steps before it asks for them."""

    def make_controller(self, roofline: Roofline, **options: Any) -> BatchLengths:
        self.table, self.sent = np.full(257, 8), deque([[]] * LAG)
        self.lengths = candidate_lengths(self.most)
        return BatchLengths(roofline, self.lengths, **options)

    def draft(self, ids: list[str], gained: list[list[int]]) -> np.ndarray:
        length, began = int(self.table[len(ids)]), self.now
        step = make_step(ids, gained, capacities=length)
        if length:
            self.method.draft(step)
            self.now = began  # what it takes is in the step's time
        else:
            self.method.draft(step, verify=False)
        return np.full(len(ids), length)

    def end_step(self, batch: int, drafted: int, seconds: float) -> None:
        self.controller.record_step(batch, batch + drafted, 300.0, seconds)
        self.sent.append(self.controller.decide(batch, 300.0))
        for first, last, chosen in self.sent.popleft():
            self.table[first : last + 1] = chosen
