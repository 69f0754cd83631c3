"""`Method`: the interface of a drafter, which the engine calls. `MethodSpec`: its registry entry."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, final

import numpy as np
from numpy.typing import NDArray

from freedraft.config import PluginOptions
from freedraft.draft import DraftBatch
from freedraft.metrics import Metrics, check_address
from freedraft.step import EngineContext, NodeLogits, Step

if TYPE_CHECKING:
    from freedraft.cost.controller import Controller
    from freedraft.cost.policies import Schedule
    from freedraft.draft_model import DraftModel


class Method:
    """A drafter in an engine. One thread calls it (another one its corpus methods); it keeps state by request id.

    A request begins, gains tokens step by step, and finishes. It may finish at any time, begin again under the same id
    (after a preemption, with its output so far among its tokens), or never take part in a step. Exceptions cost drafts,
    never tokens: see `GuardedMethod`.

    A drafter implements `propose`; `draft` lets the controller decide how much is drafted and verified. `options` has
    the type named by the `MethodSpec`; `name` is the label of the metrics.
    """

    on_host: bool = True
    """Whether drafts are made without running the model. Such drafts are also made when nothing is verified, to see
    what they would bring; and a request without one counts as unmatched."""

    needs_prompt_states: bool = False
    """Whether the engine must call `set_prompt_state`."""

    learns: bool = False
    """Whether finished outputs are used to draft for other requests. If so, `finish` must get exactly the tokens that
    clients got."""

    needs_logits: bool = False
    """Whether the engine should call `recycle` after a step, if it can."""

    def __init__(self, options: Any, context: EngineContext, controller: Controller, name: str) -> None:
        self.options, self.context, self.controller = options, context, controller
        self.metrics = Metrics(name)
        self.unmatched = np.zeros(1, np.bool_)  # [B], requests for which the last `draft` found nothing

    def begin(self, request_id: str, tokens: NDArray[np.int32], tenant: str | None, extra: Mapping[str, Any]) -> None:
        """Add a request. Called during its prefill, so it must return at once.

        Args:
            tokens: int32 [n], all tokens of the request; a view that is valid during the call only.
            tenant: tenant key (`freedraft.tenants.tenant_key`); None without one.
            extra: the client's parameters for the drafter (vLLM's extra_args, SGLang's custom_params).
        """

    def set_prompt_state(self, request_id: str, state: NDArray[np.float32]) -> None:
        """float32 [H], the normed last hidden state of the prompt's last token; called before the first step of the
        request."""

    def recycle(self, logits: NodeLogits) -> None:
        """Take the target's likeliest tokens at every node of the last step; called before the next `draft`."""

    def prepare(self, model: DraftModel) -> None:
        """Build draft passes: the target's weights and KV cache are loaded. Only called if the method runs the
        model."""

    @property
    def optimized_passes(self) -> int:
        """Number of optimized draft passes that `prepare` builds; engines reserve memory for their CUDA graphs."""
        return 0

    def rests(self) -> bool:
        """Whether the adapter need not tell the method of the next step, in which it drafts nothing. The step's tokens
        come with a later `update`, in which a request stands once per such step. Asked once per step, after one without
        drafts."""
        return False

    @final
    def draft(self, step: Step) -> DraftBatch:
        """One draft per request, in the order of the step: at most `capacities[b]` draft tokens, with widths at most
        the widest, and a chain where `trees` is False. If nobody has capacity, the drafts only teach the controller.
        Valid until the next call."""
        controller = self.controller
        controller.learn(step)
        self.update(step)
        controller.budget, verifies = 0, bool(step.most)
        max_draft_len = controller.plan(step) if verifies or self.on_host else 0
        if max_draft_len and self.on_host and controller.chosen is not None:
            step = replace(step, capacities=step.capacities * controller.chosen)
        self.unmatched = np.zeros(step.batch_size, np.bool_)
        draft = self.propose(step, max_draft_len) if max_draft_len else DraftBatch.roots(step.roots)
        if max_draft_len and self.on_host:
            self.unmatched = (draft.counts <= 1) & (step.capacities > 0)
        if verifies:
            draft.limit(step.capacities, step.trees)
        if max_draft_len:
            controller.cut(draft)
        controller.done(step)
        return draft

    def update(self, step: Step) -> None:
        """Append newly accepted tokens. Called at every step but in a pause, with or without drafts."""

    def propose(self, step: Step, max_draft_len: int) -> DraftBatch:
        """Drafts of at most `max_draft_len` tokens per request; called after `update`. Callers may cut the
        batch, whose arrays are writable; it stays valid until the next call."""
        raise NotImplementedError

    def split(self, step: Step) -> tuple[Step, NDArray[np.int64] | None]:
        """The last step, of which `drafted` is what it verified of this method's own drafts; and for a method on top of
        another one, int64 [R], accepted tokens of each draft of that one."""
        return step, None

    def record_acceptance(self, step: Step) -> None:
        """Count tokens and accepted drafts of the last step, for the metrics; called after `draft` or `update`."""
        self.metrics.add(step)

    def finish(self, request_id: str, output: NDArray[np.int32] | None) -> None:
        """Remove a request that has ended or was aborted; the id may be unknown. output: int32 [n], its output up to
        its end, without the prompt; None if the engine does not know it."""

    def close(self) -> None:
        """Release threads and files, and save learnt state. May be called more than once."""
        self.controller.save()

    # Where `MethodSpec.takes_corpora`, called from the thread of the engine's HTTP calls.
    add_corpus: Callable[[str, Sequence[NDArray[np.int32]]], int]
    """Draft from the tokenised documents of the corpus of this id, too. Returns their number of tokens. Raises
    ValueError: this corpus is not accepted; the message goes to the HTTP client."""
    remove_corpus: Callable[[str], None]
    """Stop drafting from a corpus. Raises ValueError if there is none of that id."""
    corpora: Callable[[], dict[str, int]]
    """Number of tokens of each corpus in use, by id."""


@dataclass(frozen=True, slots=True)
class MethodSpec:
    """A speculative method, for all engines. Its functions are called with (options, context)."""

    name: str  # method or algorithm name in the user's configuration
    factory: str  # "module:class" of its `Method`
    options: type[PluginOptions]  # type of its options
    checks: Callable[[Any, EngineContext], None] | None = None  # see `check`
    runs_model: bool = False  # whether it drafts by a `DraftModel`: KV slots are then reserved for its drafts
    takes_corpora: bool = False  # whether it takes corpora over HTTP
    # Draft lengths by batch size, for engines that decide them beforehand.
    schedule: Callable[[Any, EngineContext], Schedule | None] | None = None
    default_length: int | None = None  # default maximum of draft tokens of a tree; None if the user must set one

    def check(self, options: PluginOptions, context: EngineContext) -> None:
        """Called before the engine starts. Raises ValueError, one clear line, for errors that would come later."""
        check_address(options.metrics_port, options.metrics_host, context.rank)
        if self.checks is not None:
            self.checks(options, context)

    def make(self, options: PluginOptions, context: EngineContext, *controller: Controller) -> Any:
        """Build the `Method`. controller: one that it shares with another method. Raises ValueError: it cannot work."""
        module, _, name = self.factory.partition(":")
        return getattr(importlib.import_module(module), name)(options, context, *controller)


REPLACED = {"hybrid": "there is no method 'hybrid' any more: use 'sssd+layerskip', which takes its options"}

# Registered methods by name; each engine's adapter adds the ones that it serves.
METHODS: dict[str, MethodSpec] = {}
