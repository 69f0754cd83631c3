"""`on_top`: a method whose drafts go on behind those of another one that runs the model, in one engine;
`register_installed`: all methods.

The tokens of the other one ("below") are always verified. A draft that begins with all of them goes on behind.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from importlib.metadata import entry_points
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from freedraft.config import ConfigError, PluginOptions
from freedraft.draft import DraftBatch
from freedraft.draft_model import DraftModel
from freedraft.method import METHODS, Method, MethodSpec
from freedraft.step import EngineContext, NodeLogits, Step, rows_in

NGRAMS, DEFAULT, MOST = "ngram_tokens", 15, 63  # option: most tokens of a draft, those of the drafter below included
OWN = 5  # tokens of the drafter below, where the engine's setting is that of both


class BothOptions(PluginOptions):
    """Base of the options of both methods together."""

    specs: ClassVar[tuple[MethodSpec, MethodSpec]]  # above, below

    ngram_tokens: int | None = Field(default=None, ge=1, le=MOST)
    length: int | None = Field(default=None, ge=1, le=MOST)  # most tokens of the drafter below
    shape: Literal["chain"] = "chain"

    def of(self, spec: MethodSpec) -> PluginOptions:
        """The options of one of both that were set."""
        given = self.model_dump(exclude_unset=True, include=set(spec.options.model_fields))
        return spec.options.parse(given | {"shape": self.shape})

    def engine_tokens(self, tokens: int) -> tuple[Self, int]:
        """Options where the drafter below drafts up to `tokens`, unless they say so; most tokens of a draft. Raises
        ConfigError."""
        if self.ngram_tokens is not None and self.ngram_tokens < tokens:
            below = self.specs[1].name
            raise ConfigError(
                f"option '{NGRAMS}' must be at least the {tokens} tokens of '{below}', not {self.ngram_tokens}"
            )
        own = self.model_copy(update={"length": min(self.length or tokens, tokens)})
        return own, self.ngram_tokens or max(tokens, DEFAULT)


def on_top(above: MethodSpec, below: MethodSpec) -> MethodSpec:
    """The method of both."""
    name = f"{above.name}+{below.name}"

    class Options(BothOptions, above.options, below.options):  # type: ignore[name-defined]
        source_name: ClassVar[str] = name
        specs: ClassVar[tuple[MethodSpec, MethodSpec]] = above, below

    def check(options: Any, context: EngineContext) -> None:
        if options.ngram_tokens is not None and context.widths is not None:
            raise ConfigError(f"option '{NGRAMS}' is --speculative-num-draft-tokens here: set that one")
        for spec in (above, below):
            if spec.checks is not None:
                spec.checks(options.of(spec), context)

    schedule = above.schedule
    return MethodSpec(
        name, f"{__name__}:OnTop", Options, check, runs_model=True, takes_corpora=above.takes_corpora,
        schedule=schedule and (lambda options, context: schedule(options.of(above), context)),
    )  # fmt: skip


def register_installed(register: Callable[[MethodSpec], object]) -> None:
    """Register the methods in the entry point group `freedraft.methods`, and what goes on top of another one. One that
    fails is logged, and left out."""
    for point in entry_points(group="freedraft.methods"):
        try:
            register(point.load())
        except Exception:
            logging.getLogger(__name__).exception("freedraft: no method '%s': %s failed", point.name, point.value)
    if "sssd" in METHODS and "layerskip" in METHODS:
        register(on_top(METHODS["sssd"], METHODS["layerskip"]))


class OnTop(Method):
    """Drafts of the method below, continued. The metrics are those of the one above. Raises ValueError: one of both
    cannot work."""

    on_host = False

    def __init__(self, options: Any, context: EngineContext) -> None:
        above, below = options.specs
        self.above: Method = above.make(options.of(above), context)
        super().__init__(options, context, self.above.controller, above.name)
        self.metrics = self.above.metrics
        self._most: int = min(options.length or OWN, context.max_draft_tokens)
        inner = replace(context, max_draft_tokens=self._most)
        # One that measures nothing would leave it without prices where steps have no scheduled length.
        shared = (self.controller,) if self.controller.measured is not None or context.lengths is not None else ()
        self.below: Method = below.make(options.of(below), inner, *shared)
        self.learns, self.needs_logits = self.above.learns, self.above.needs_logits
        self.needs_prompt_states = self.below.needs_prompt_states
        if above.takes_corpora:
            self.add_corpus, self.remove_corpus = self.above.add_corpus, self.above.remove_corpus
            self.corpora = self.above.corpora
        self._drafted: tuple[list[str], NDArray[np.int32]] = [], np.zeros(0, np.int32)  # by the one below
        self._last: tuple[Step, Step, NDArray[np.int64]] | None = None  # see `split`

    def propose(self, step: Step, max_draft_len: int) -> DraftBatch:
        draft = self.below.propose(step, min(max_draft_len, self._most))
        self._drafted = list(step.request_ids), np.maximum(draft.counts - 1, 0)
        return continued(draft, self.above.propose(step, max_draft_len))

    def update(self, step: Step) -> None:
        names, drafted = self._drafted
        rows = rows_in(names, step.request_ids)
        lengths = np.where(rows < 0, 0, np.append(drafted, np.int32(0))[rows])
        of_below = replace(step, drafted=np.minimum(step.drafted, lengths))
        # As of drafters of the engine: what goes on behind is judged where all before it was right.
        gone_on = (step.drafted > lengths) & (step.gained > lengths)
        of_above = replace(step, drafted=np.where(gone_on, step.drafted, np.int32(0)))
        self._last = step, of_above, of_below.accepted[of_below.drafted > 0].astype(np.int64)
        self._drafted = [], drafted[:0]
        self.above.update(of_above)
        self.below.update(of_below)

    def split(self, step: Step) -> tuple[Step, NDArray[np.int64] | None]:
        if self._last is None or self._last[0] is not step:
            return step, None
        return self._last[1:]

    def begin(self, request_id: str, tokens: NDArray[np.int32], tenant: str | None, extra: Mapping[str, Any]) -> None:
        self.above.begin(request_id, tokens, tenant, extra)
        self.below.begin(request_id, tokens, tenant, extra)

    def finish(self, request_id: str, output: NDArray[np.int32] | None) -> None:
        try:
            self.above.finish(request_id, output)
        finally:
            self.below.finish(request_id, output)

    def close(self) -> None:
        self.above.close()
        self.below.close()

    # What one of the two serves alone.

    optimized_passes = property(lambda self: self.below.optimized_passes)

    def prepare(self, model: DraftModel) -> None:
        self.below.prepare(model)

    def set_prompt_state(self, request_id: str, state: NDArray[np.float32]) -> None:
        self.below.set_prompt_state(request_id, state)

    def recycle(self, logits: NodeLogits) -> None:
        self.above.recycle(logits)

    def record_acceptance(self, step: Step) -> None:
        self.above.record_acceptance(step)


def continued(draft: DraftBatch, other: DraftBatch) -> DraftBatch:
    """Chains of `draft`, each with the rest of the chain of `other` that begins with all of its tokens, if one does."""
    result = DraftBatch.empty(draft.batch_size, max(draft.max_nodes, other.max_nodes))
    both, counts = min(draft.max_nodes, other.max_nodes), draft.counts[:, None]
    parted = (draft.tokens[:, :both] != other.tokens[:, :both]) & (np.arange(both) < counts)
    longer = ~parted.any(1) & (other.counts > draft.counts) & (draft.counts > 0)
    tail = longer[:, None] & (np.arange(other.max_nodes) >= counts)
    rows, last = np.arange(draft.batch_size), np.maximum(draft.counts - 1, 0)
    # The other's own estimate, given that its first tokens are right.
    given = draft.scores[rows, last] / np.maximum(other.scores[rows, np.minimum(last, other.max_nodes - 1)], 1e-9)
    for name in ("tokens", "parents", "depths", "scores", "kinds"):
        target, behind = getattr(result, name), getattr(other, name)
        target[:, : draft.max_nodes] = getattr(draft, name)
        behind = behind * given[:, None] if name == "scores" else behind
        np.copyto(target[:, : other.max_nodes], behind, where=tail)
    result.counts[:] = np.where(longer, other.counts, draft.counts)
    return result
