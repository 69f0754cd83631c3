"""Engines of known step times, and text of which drafts are accepted with a known probability."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from freedraft.cost.auto import Auto
from freedraft.cost.auto_by_batch import BatchLengths, candidate_lengths
from freedraft.cost.controller import Controller, DrafterDecides
from freedraft.cost.measured import Measured
from freedraft.cost.roofline import Roofline
from freedraft.draft import DraftBatch
from freedraft.draft_model import Drafted, DraftModel, PassOutputs
from freedraft.engines.sglang.guards import widths_for
from freedraft.method import Method
from freedraft.step import EngineContext, Step
from layerskip_plugin.method import LayerSkipMethod
from layerskip_plugin.options import LayerSkipOptions
from layerskip_plugin.selection.base import Selection
from layerskip_plugin.skip_set import SHAPE_FIELDS, SkipSet
from tests.cost.known import ROOFLINE
from tests.support.steps import chains, make_step

LAG = 2  # steps until an asynchronous scheduler has heard of what a step says
Seconds = Callable[[int, int], float]  # of a step, by batch size and query tokens
SETS = [SkipSet.of_sublayers(range(first, 60, 2), 30) for first in range(2)]  # of all attention, and of all MLPs


class Text(NamedTuple):
    """accept: share of tokens that are accepted behind accepted ones, of a request [B, 1], or by skip set; promised:
    what the drafter says of it, or a function of position and rows that gives it."""

    accept: Any
    promised: Any = 0.5


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
        self.method: Any = self.make_method()

    def make_method(self) -> Method:
        return Drafter(self.controller, self)

    def chance(self, text: Text) -> Any:
        return text.accept

    def verified(self, lengths: np.ndarray) -> int:
        return int(lengths.sum())

    def run(self, batch: int, text: Text, steps: int) -> np.ndarray:
        """float64 [steps, 3]: tokens, seconds and draft tokens of each step."""
        self.text, rows, ids = text, [], [f"{batch} {text} {i}" for i in range(batch)]
        gained, right, self.drafted = np.ones(batch, int), np.zeros(batch, int), np.zeros(batch, int)
        for _ in range(steps):
            # Tokens of the draft while they were right, verified or not, then another one.
            tokens = [[*range(1, n), n if n <= r else 999] for n, r in zip(gained, right, strict=True)]
            began = self.now
            lengths = self.drafted = self.draft(ids, tokens)
            drafted = self.verified(lengths)
            seconds = self.seconds(batch, batch + drafted) * self.random.lognormal(0, self.noise)
            self.now += seconds
            right = np.cumprod(self.random.random((batch, self.most)) < self.chance(text), axis=1).sum(axis=1)
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
        return Auto(roofline.profile, self.most, None, Measured(roofline, **options))

    def draft(self, ids: list[str], gained: list[list[int]]) -> np.ndarray:
        if self.previous == (len(ids), len(ids)) and self.controller.rests():
            return np.zeros(len(ids), int)
        return self.method.draft(make_step(ids, gained, capacities=self.most, previous=self.previous)).counts - 1

    def end_step(self, batch: int, drafted: int, seconds: float) -> None:
        self.previous = batch, batch + drafted


class Sglang(V1):
    """Verifies all requests at the width of the largest; as on GPUs, there are few, with adapters one."""

    adapters = False

    def make_controller(self, roofline: Roofline, **options: Any) -> Auto:
        self.widths = widths_for("fa3", self.most, adapters=self.adapters)
        self.lengths = [width - 1 for width in self.widths]
        return Auto(roofline.profile, self.most - 1, self.widths, Measured(roofline, **options))

    def verified(self, lengths: np.ndarray) -> int:
        return len(lengths) * (self.widths[int(np.searchsorted(self.widths, lengths.max() + 1))] - 1)


class V2(Engine):
    """Decides the length of drafts by the batch's size, some steps before it asks for them."""

    def make_controller(self, roofline: Roofline, **options: Any) -> BatchLengths:
        self.table, self.sent = np.full(257, 8), deque([[]] * LAG)
        self.lengths = candidate_lengths(self.most)
        return BatchLengths(Measured(roofline, **options), self.lengths)

    def draft(self, ids: list[str], gained: list[list[int]]) -> np.ndarray:
        length, began = int(self.table[len(ids)]), self.now
        self.method.draft(make_step(ids, gained, capacities=length))
        if length:
            self.now = began  # what it takes is in the step's time
        return np.full(len(ids), length)

    def end_step(self, batch: int, drafted: int, seconds: float) -> None:
        self.controller.record_step(batch, batch + drafted, 300.0, seconds)
        self.sent.append(self.controller.decide(batch, 300.0))
        for first, last, chosen in self.sent.popleft():
            self.table[first : last + 1] = chosen


class Passes(V1):
    """Layer skipping by draft passes of known times. In a batch request i has set i, in turns.

    Attributes:
        pass_seconds: of a draft pass, by number of requests.
        used: by step, the recipe that drafted.
    """

    context = 300
    scheduled: tuple[int, ...] | None = None

    def __init__(
        self, seconds: Seconds, pass_seconds: Callable[[int], float], *, sets: Sequence[SkipSet] = SETS[:1],
        lookahead: Any = None, **options: Any,
    ) -> None:  # fmt: skip
        self.pass_seconds, self.sets, self.lookahead, self.used = pass_seconds, sets, lookahead, list[Any]()
        super().__init__(seconds, **{"noise": 0.0} | options)

    def make_controller(self, roofline: Roofline, **options: Any) -> Any:
        self.lengths = range(self.most + 1)
        return DrafterDecides(roofline.profile, self.most, None, Measured(roofline, **options))

    def make_method(self) -> LayerSkipMethod:
        shape = dict.fromkeys(SHAPE_FIELDS, 1) | {"num_hidden_layers": self.sets[0].n_layers}
        known = {"max_draft_tokens": self.most, "lengths": self.scheduled}
        context = EngineContext(hf_config=SimpleNamespace(**shape), **known)
        method = LayerSkipMethod(LayerSkipOptions(), context, self.controller)
        method.selection = InTurns({str(i): skip_set for i, skip_set in enumerate(self.sets)})
        method.use(self.sets)
        method.lookahead.use(self.sets)
        method.lookahead = self.lookahead or method.lookahead
        method.prepare(SkippedModel(self))
        return method

    def chance(self, text: Text) -> Any:
        return text.accept.get(self.used[-1], 0.0) if isinstance(text.accept, Mapping) else text.accept

    def draft(self, ids: list[str], gained: list[list[int]]) -> np.ndarray:
        how = {"contexts": self.context, "capacities": self.most, "drafted": self.drafted, "previous": self.previous}
        draft = self.method.draft(make_step(ids, gained, **how))
        self.used.append(self.method.recipe if draft.max_nodes > 1 else None)
        return draft.counts - 1

    def rates(self, batch: int, text: Text) -> list[float]:
        return [
            1 / (1 / rate + n * self.pass_seconds(batch) / (batch * sum(text.accept**i for i in range(n + 1))))
            for n, rate in enumerate(super().rates(batch, text))
        ]


class ScheduledPasses(Passes):
    """The same in `V2`: the engine decides how many tokens a step verifies, and passes may draft fewer."""

    table: np.ndarray
    sent: Any

    def __init__(self, seconds: Seconds, *given: Any, **options: Any) -> None:
        self.length, self.waited = 0, 0.0
        super().__init__(lambda batch, _: seconds(batch, batch * (1 + self.length)), *given, **options)

    def make_controller(self, roofline: Roofline, **options: Any) -> Any:
        made = V2.make_controller(self, roofline, **options)  # type: ignore[arg-type]
        self.scheduled = tuple(self.lengths)
        return made

    def draft(self, ids: list[str], gained: list[list[int]]) -> np.ndarray:
        self.length, began = int(self.table[len(ids)]), self.now
        how = {"contexts": self.context, "capacities": self.length, "drafted": self.drafted}
        lengths = self.method.draft(make_step(ids, gained, **how)).counts - 1
        self.waited = self.now - began
        return lengths

    def end_step(self, batch: int, drafted: int, seconds: float) -> None:
        V2.end_step(self, batch, batch * self.length, seconds + self.waited)  # type: ignore[arg-type]


class InTurns(Selection):
    def choose(self, request_ids: Sequence[str], contexts: Any) -> list[SkipSet]:
        return [list(self.sets.values())[i % len(self.sets)] for i in range(len(request_ids))]


class MadeUpModel(DraftModel):
    """A draft model without a model; `launch` gives the drafts."""

    waits, outputs = False, PassOutputs()

    def build(self, recipe: Any, outputs: PassOutputs, *, optimize: bool) -> Any:
        return recipe, outputs

    def start(self, step: Step, draft_pass: Any, rows: np.ndarray, max_draft_len: int) -> Any:
        self.recipe, self.outputs = draft_pass
        return self

    def scorer(self, window: int) -> Any:
        raise AssertionError("nothing searches here")

    def read(self, launched: Drafted) -> Drafted:
        return launched


class SkippedModel(MadeUpModel):
    """Drafts token i at position i - 1, as promised by the text of the engine."""

    def __init__(self, engine: Passes) -> None:
        self.engine, self.n_layers = engine, engine.sets[0].n_layers

    def launch(self, rows: np.ndarray, tokens: np.ndarray, position: int, count: int = 1) -> Drafted:
        self.engine.now += self.engine.pass_seconds(len(rows))
        shape, promised = (1, len(rows), self.outputs.top), self.engine.text.promised
        probabilities = np.zeros(shape, np.float32)
        probabilities[0, :, 0] = promised(position, rows) if callable(promised) else promised
        return Drafted(np.full(shape, position + 1, np.int32), probabilities, np.zeros(shape[:2], np.float32))
