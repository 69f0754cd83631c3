"""`HybridMethod`: two drafters in an engine under one controller, one on the host and one that runs the model."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freedraft.config import ConfigError
from freedraft.cost.controller import Auto
from freedraft.cost.policies import Controller
from freedraft.cost.probes import ProbeSchedule
from freedraft.draft import DraftBatch
from freedraft.draft_model import DraftModel
from freedraft.draft_pass import RestOfBatch
from freedraft.hybrid.choice import Choice, choose, poorest_first, sizes_up_to
from freedraft.hybrid.options import NAME, part_options
from freedraft.method import Method, ModelMethod, spec_of_role
from freedraft.step import EngineContext, NodeLogits, Step

# Steps without draft passes after which they are tried again, at first and at most.
FIRST_PROBE, RAREST_PROBE = 128, 256
MAY_PAY_STEPS = 16  # after which it is estimated again whether passes could pay at all
FADE = float(np.exp(-1 / 12))  # an old step counts 1/e in the mean speed of a request after 12 steps


class HybridMethod(Method):
    """Every request gets a draft of the host's drafter; those with the poorest drafts get draft passes instead, as many
    as pay for the whole batch.

    Raises:
        ConfigError: steps of this model cannot be priced.
    """

    def __init__(self, options: Any, context: EngineContext, controller: Controller | None = None) -> None:
        self.host: Method = spec_of_role("host").make(part_options(options, "host"), context, controller)
        auto = self.host.controller
        if not isinstance(auto, Auto):
            raise ConfigError(
                f"'{NAME}' cannot price this model's steps (see the warning above): use one drafter alone"
            )
        super().__init__(options, context, auto, NAME)
        self.auto = auto
        self.model: ModelMethod = spec_of_role("model").make(part_options(options, "model"), context, auto)
        self.needs_prompt_states = self.model.needs_prompt_states
        self._speeds: dict[str, tuple[float, float]] = {}  # fading sums of tokens and seconds
        self._probes = ProbeSchedule(FIRST_PROBE, RAREST_PROBE)
        self._may_pay: dict[int, tuple[bool, int]] = {}
        self._by_model: set[str] = set()
        self._previous: tuple[frozenset[str], float] = frozenset(), 0.0

    # -- one step ------------------------------------------------------------------------------------------------------

    def draft(self, step: Step) -> DraftBatch:
        controller, batch = self.auto, step.batch_size
        controller.update(step)
        self.update(step)
        max_draft_len = controller.max_draft_len(step)
        draft = self.host.propose(step, max_draft_len) if max_draft_len else DraftBatch.roots(step.roots)
        np.minimum(draft.counts, step.capacities + 1, out=draft.counts)
        capacities = self.model.capacities(step)
        choice, kept = self._choose(step, draft, capacities)
        verified, passes = 0, 0.0
        if len(choice.rows):
            rows = choice.rows
            started = time.perf_counter()
            limits = np.minimum(capacities[rows], choice.max_draft_len)
            passed = self.model.propose_for(step, rows, limits, _rest(kept, choice))
            passes = time.perf_counter() - started
            controller.exclude(passes)
            counts = np.zeros_like(draft.counts)
            counts[rows] = draft.counts[rows]
            unverified = replace(draft, counts=counts)
            draft = replaced(draft, passed, rows)
            verified = controller.truncate(draft, unverified)
            self._by_model = {step.request_ids[i] for i in rows.tolist()}
        elif max_draft_len:
            verified = controller.truncate(draft)
        tokens = batch + verified if controller.widths is None else batch * max(verified, 1)
        seconds = passes + float(controller.step_seconds(batch, tokens)) if batch else 0.0
        self._previous = frozenset(step.request_ids), seconds
        controller.end(step)
        return draft

    def update(self, step: Step) -> None:
        before, seconds = self._previous
        for request_id, gained in zip(step.request_ids, step.gained.tolist(), strict=True) if seconds else ():
            if request_id in before:
                tokens, passed = self._speeds.get(request_id, (0.0, 0.0))
                self._speeds[request_id] = FADE * tokens + gained, FADE * passed + seconds
        self.host.update(step)
        self.model.update(step)

    def _choose(self, step: Step, draft: DraftBatch, capacities: NDArray[np.int32]) -> tuple[Choice, NDArray[np.int32]]:
        """The requests that get draft passes in place of their n-grams (now and then all of them, as a trial), and
        int32 [B], the nodes of the n-gram drafts that are worth verifying."""
        batch, max_len = step.batch_size, int(capacities.max(initial=0))
        choice, kept = Choice(np.zeros(0, np.intp), 0, 0.0), draft.counts
        if max_len < 1:
            return choice, kept
        if self._passes_may_pay(batch, max_len):
            p, kept = self.auto.estimate(draft)
            order = poorest_first(p, kept, capacities > 0)
            estimate = self.model.estimate(sizes_up_to(len(order)), max_len)
            rate = self._tokens_per_second(step.request_ids)
            choice = choose(p, kept, order, estimate, self.auto.table(batch), self.auto.widths, rate)
        pays = len(choice.rows) > 0
        if pays:
            self._probes.reset()
        elif self.model.wants_trial or self._probes.due():
            rate = max(choice.rate, self._tokens_per_second(step.request_ids))
            choice = Choice(np.flatnonzero(capacities > 0), max_len, rate)
        if len(choice.rows):
            self.model.begin_round(pays=pays)
        return choice, kept

    def _tokens_per_second(self, request_ids: Sequence[str]) -> float:
        """Recent speed of these requests together; new ones count as 0."""
        sums = (self._speeds[request_id] for request_id in request_ids if request_id in self._speeds)
        return sum(tokens / seconds for tokens, seconds in sums)

    def _passes_may_pay(self, batch: int, max_len: int) -> bool:
        known, left = self._may_pay.get(batch, (False, 0))
        if left == 0:
            nothing, roots, order = np.zeros((batch, 1)), np.ones(batch, np.int32), np.arange(batch)
            estimate = self.model.estimate(sizes_up_to(batch), max_len)
            known = len(choose(nothing, roots, order, estimate, self.auto.table(batch), self.auto.widths).rows) > 0
            left = MAY_PAY_STEPS
        self._may_pay[batch] = known, left - 1
        return known

    def record_acceptance(self, step: Step) -> None:
        if not self._by_model:
            return self.host.record_acceptance(step)
        by_model = np.fromiter((i in self._by_model for i in step.request_ids), np.bool_, step.batch_size)
        self._by_model = set()
        for part, rows in ((self.host, ~by_model), (self.model, by_model)):
            part.metrics.request_steps.inc(int(rows.sum()))
            part.metrics.tokens.inc(int(step.gained[rows].sum()))
            part.metrics.drafted.inc(int(step.drafted[rows].sum()))
            part.metrics.accepted.inc(int(step.accepted[rows].sum()))

    # -- requests ------------------------------------------------------------------------------------------------------

    def begin(self, request_id: str, tokens: NDArray[np.int32], tenant: str | None, extra: Mapping[str, Any]) -> None:
        self.host.begin(request_id, tokens, tenant, extra)
        self.model.begin(request_id, tokens, tenant, extra)

    def set_prompt_state(self, request_id: str, state: NDArray[np.float32]) -> None:
        self.model.set_prompt_state(request_id, state)

    @property
    def learns(self) -> bool:
        return self.host.learns

    @property
    def needs_logits(self) -> bool:
        return self.host.needs_logits

    def recycle(self, logits: NodeLogits) -> None:
        self.host.recycle(logits)

    def finish(self, request_id: str, output: NDArray[np.int32] | None, aborted: bool) -> None:
        self._by_model.discard(request_id)
        self._speeds.pop(request_id, None)
        self.host.finish(request_id, output, aborted)
        self.model.finish(request_id, output, aborted)

    def prepare(self, model: DraftModel) -> None:
        self.model.prepare(model)

    @property
    def optimized_passes(self) -> int:
        return self.model.optimized_passes

    def close(self) -> None:
        self.host.close()
        self.model.close()

    def add_corpus(self, corpus_id: str, documents: Sequence[NDArray[np.int32]]) -> int:
        return self.host.add_corpus(corpus_id, documents)

    def commit_corpus(self, corpus_id: str) -> None:
        self.host.commit_corpus(corpus_id)

    def remove_corpus(self, corpus_id: str) -> None:
        self.host.remove_corpus(corpus_id)

    def corpora(self) -> dict[str, int]:
        return self.host.corpora()


def _rest(kept: NDArray[np.int32], choice: Choice) -> RestOfBatch:
    """The requests without passes, whose drafts will have `kept` nodes."""
    mask = np.ones(len(kept), np.bool_)
    mask[choice.rows] = False
    nodes = np.maximum(kept[mask], 1)
    return RestOfBatch(len(nodes), int(nodes.sum()), choice.rate, int(nodes.max(initial=1)))


def replaced(draft: DraftBatch, other: DraftBatch, rows: NDArray[np.intp]) -> DraftBatch:
    """A copy of `draft` with the drafts of `other` at `rows`."""
    result = DraftBatch.empty(draft.batch_size, max(draft.max_nodes, other.max_nodes))
    for name in ("tokens", "parents", "depths", "scores", "kinds"):
        target = getattr(result, name)
        target[:, : draft.max_nodes] = getattr(draft, name)
        target[rows, : other.max_nodes] = getattr(other, name)[rows]
    result.counts[:] = draft.counts
    result.counts[rows] = other.counts[rows]
    return result
