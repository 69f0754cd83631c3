"""`HybridMethod`: n-gram drafts for every request, draft passes of the model for requests with poor ones."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freedraft.config import ConfigError
from freedraft.cost.auto import Auto
from freedraft.cost.controller import holding
from freedraft.draft import DraftBatch
from freedraft.draft_model import DraftModel
from freedraft.hybrid.options import NAME, HybridOptions
from freedraft.method import Method
from freedraft.step import EngineContext, NodeLogits, Step
from layerskip_plugin.method import LayerSkipMethod
from layerskip_plugin.rounds import OtherRequests
from sssd_plugin.method import SssdMethod

LEAST_YIELD = 1.0  # expected accepted n-gram tokens below which a request drafts by passes
MARGIN = 1.1  # required ratio of gain to cost of passes; compensates for errors of estimates
FADE = float(np.exp(-1 / 12))  # decay per step of a request's recent speed: 1/e after 12 steps


class HybridMethod(Method):
    """Every request gets an n-gram draft. Requests with an expected gain below `LEAST_YIELD` tokens draft by passes
    instead, if that pays for the whole step.

    Passes draft several tokens, some of which n-grams would have offered for free a step later. So their gain must
    exceed the tokens that their time is worth at the recent speed of these requests, or at the speed of the step
    without passes.

    Raises:
        ConfigError: steps of this model cannot be priced.
    """

    controller: Auto

    def __init__(self, options: HybridOptions, context: EngineContext) -> None:
        of_ngrams, of_passes = options.parts()
        self.ngrams = SssdMethod(of_ngrams, context)
        auto = self.ngrams.controller
        if not isinstance(auto, Auto):
            raise ConfigError(
                f"'{NAME}' cannot price this model's steps (see the warning above): use one drafter alone"
            )
        super().__init__(options, context, auto, NAME)
        self.passes = LayerSkipMethod(of_passes, context, auto)
        self.learns, self.needs_logits = self.ngrams.learns, self.ngrams.needs_logits
        self.needs_prompt_states = self.passes.needs_prompt_states
        self.add_corpus, self.remove_corpus = self.ngrams.add_corpus, self.ngrams.remove_corpus
        self.corpora = self.ngrams.corpora
        self._speeds: dict[str, tuple[float, float]] = {}  # fading sums of tokens and seconds
        self._by_model = self._verified_by_model = set[str]()
        self._previous: tuple[frozenset[str], float] = frozenset(), 0.0

    def proposals(self, step: Step, max_draft_len: int) -> Sequence[DraftBatch]:
        draft = self.ngrams.propose(step, max_draft_len) if max_draft_len else DraftBatch.roots(step.roots)
        draft.limit(step.capacities, step.trees)
        self.unmatched = (draft.counts <= 1) & (max_draft_len > 0)
        rows, others = self._rows_of_passes(step, draft)
        drafts, started = [draft], time.perf_counter()
        if len(rows):
            passed = self.passes.propose_for(step, rows, self.passes.capacities(step)[rows], others)
            self.controller.exclude(time.perf_counter() - started)
            counts = np.zeros_like(draft.counts)
            counts[rows] = draft.counts[rows]
            drafts = [replaced(draft, passed, rows), replace(draft, counts=counts)]
        self._by_model = {step.request_ids[i] for i in rows.tolist()}
        self._previous = frozenset(step.request_ids), time.perf_counter() - started
        return drafts

    def update(self, step: Step) -> None:
        self._verified_by_model = self._by_model
        before, seconds = self._previous
        if before:
            seconds += float(self.controller.measured.step_seconds(len(before), len(before) + self.controller.budget))
        for request_id, gained in zip(step.request_ids, step.gained.tolist(), strict=True):
            if request_id in before:
                tokens, passed = self._speeds.get(request_id, (0.0, 0.0))
                self._speeds[request_id] = FADE * tokens + gained, FADE * passed + seconds
        # The host's drafts of requests that drafted by passes were not verified.
        self.ngrams.update(replace(step, drafted=np.where(self._by_model_of(step), np.int32(0), step.drafted)))
        self.passes.update(step)

    def _by_model_of(self, step: Step) -> NDArray[np.bool_]:
        """bool [B], requests whose last drafts were of the model."""
        return np.array([i in self._verified_by_model for i in step.request_ids], np.bool_)

    def _rows_of_passes(self, step: Step, draft: DraftBatch) -> tuple[NDArray[np.intp], OtherRequests]:
        """intp [R], the requests that draft by passes in this step (occasionally as a trial), and the others."""
        auto, batch, capacities = self.controller, step.batch_size, self.passes.capacities(step)
        if not batch:
            return np.zeros(0, np.intp), OtherRequests(0, 0, None)
        p, kept = auto.estimate(draft)
        yields = np.where(np.arange(draft.max_nodes) < kept[:, None], p, 0.0).sum(1)
        rows = np.flatnonzero((yields < LEAST_YIELD) & (capacities > 0))
        sums = (self._speeds[request_id] for request_id in step.request_ids if request_id in self._speeds)
        rate, others = sum(tokens / seconds for tokens, seconds in sums), np.delete(kept, rows)
        if len(rows):
            passes = self.passes.estimate(len(rows), int(capacities[rows].max()))
            if auto.widths is None:
                alone, together = kept.sum(), others.sum() + len(rows) + passes.tokens
            else:  # all requests are as wide as the largest of them
                nodes = np.append(kept.max(), np.maximum(np.arange(len(passes.gain)) + 2, others.max(initial=1)))
                fitting = batch * holding(nodes, auto.widths)
                alone, together = fitting[0], fitting[1:]
            tokens, gain = batch + yields.sum(), passes.gain - yields[rows].sum()
            seconds_alone = float(auto.measured.step_seconds(batch, alone))
            seconds = auto.measured.step_seconds(batch, together) + passes.seconds
            rate, more = max(rate, float(tokens / seconds_alone)), seconds - seconds_alone
            # Where passes shorten the step, saved time is discounted by the margin.
            pays = gain > rate * np.maximum(MARGIN * more, more / MARGIN)
            rate = max(rate, float(((tokens + gain) / seconds)[pays].max(initial=0.0)))
            if not self.passes.begin_round(pays=bool(pays.any())):
                rows, others = rows[:0], kept
        return rows, OtherRequests(len(others), int(others.sum()), rate, int(others.max(initial=1)))

    def record_acceptance(self, step: Step, rows: NDArray[np.bool_] | None = None) -> None:
        by_model = self._by_model_of(step)
        self.ngrams.record_acceptance(step, ~by_model)
        self.passes.record_acceptance(step, by_model)

    def begin(self, request_id: str, tokens: NDArray[np.int32], tenant: str | None, extra: Mapping[str, Any]) -> None:
        self.ngrams.begin(request_id, tokens, tenant, extra)
        self.passes.begin(request_id, tokens, tenant, extra)

    def finish(self, request_id: str, output: NDArray[np.int32] | None) -> None:
        self._by_model.discard(request_id)
        self._speeds.pop(request_id, None)
        try:
            self.ngrams.finish(request_id, output)
        finally:
            self.passes.finish(request_id, output)

    def close(self) -> None:
        self.ngrams.close()
        self.passes.close()

    # What one of the two serves alone.

    optimized_passes = property(lambda self: self.passes.optimized_passes)

    def prepare(self, model: DraftModel) -> None:
        self.passes.prepare(model)

    def set_prompt_state(self, request_id: str, state: NDArray[np.float32]) -> None:
        self.passes.set_prompt_state(request_id, state)

    def recycle(self, logits: NodeLogits) -> None:
        self.ngrams.recycle(logits)


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
