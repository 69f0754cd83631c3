"""`Method`: the interface of a drafter, which the engine calls. `MethodSpec`: its registry entry."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from freedraft.config import ConfigError, PluginOptions
from freedraft.draft import DraftBatch
from freedraft.metrics import Metrics
from freedraft.step import EngineContext, NodeLogits, Step

if TYPE_CHECKING:
    from freedraft.cost.policies import Controller
    from freedraft.cost.schedule import Schedule
    from freedraft.draft_model import DraftModel
    from freedraft.draft_pass import DraftPassEstimate, RestOfBatch


class Method:
    """A drafter in an engine. It is called from one thread (corpora from another one), and keeps state by request id.

    A request begins, gains tokens by steps, and finishes; it may finish at any time, begin anew under the same id
    (after a preemption, with its output so far as part of its tokens), or never take part in a step. What a method
    raises costs drafts, never tokens: see `GuardedMethod`.

    A drafter that only proposes implements `propose`; `draft` then lets the controller decide how much is verified. Its
    options are of the type that its `MethodSpec` names; its name is the label of its metrics.
    """

    needs_prompt_states: bool = False
    """Whether `set_prompt_state` is to be called."""

    draft_timeout: float = 0.0
    """Seconds that a step waits for its drafts where they can be made in a thread of their own (SGLang), which then is
    the one that the method is called from; 0: the engine's own thread makes them, and waits."""

    @property
    def learns(self) -> bool:
        """Whether other requests are drafted for from what `finish` gets, so that it must be what clients got."""
        return False

    @property
    def needs_logits(self) -> bool:
        """Whether `recycle` is to be called after the next step, where the engine can."""
        return False

    def __init__(self, options: Any, context: EngineContext, controller: Controller, name: str) -> None:
        self.options, self.context, self.controller = options, context, controller
        self.metrics = Metrics.of(name)

    def begin(self, request_id: str, tokens: NDArray[np.int32], tenant: str | None, extra: Mapping[str, Any]) -> None:
        """A request's prompt is known. Called while its prefill runs, so it must return at once.

        Args:
            tokens: int32 [n], all tokens of the request; a view that is valid during the call only.
            tenant: whose text it is (`freedraft.tenants.tenant_key`); None where nobody says.
            extra: what the client sent for the drafter (vLLM's extra_args, SGLang's custom_params).
        """

    def set_prompt_state(self, request_id: str, state: NDArray[np.float32]) -> None:
        """float32 [H], the normed last hidden state behind a prompt; before the first step of the request."""

    def recycle(self, logits: NodeLogits) -> None:
        """What the target thinks comes next at every node that the last step verified, before the `draft` of the
        next."""

    def prepare(self, model: DraftModel) -> None:
        """The target's weights and KV cache are there. Only methods that run the model are called."""

    @property
    def optimized_passes(self) -> int:
        """How many draft passes `prepare` builds to be optimized, those of one skip set through several windows
        counted once. Engines keep memory for their CUDA graphs."""
        return 0

    def draft(self, step: Step) -> DraftBatch:
        """The drafts to verify, rows in the order of the step: at most `capacities[b]` draft tokens each, and with
        `widths` at most the widest. Without widths they must be chains, unless `trees` says otherwise. Valid until the
        next call."""
        controller = self.controller
        controller.update(step)
        self.update(step)
        max_draft_len = controller.max_draft_len(step)
        if max_draft_len > 0:
            draft = self.propose(step, max_draft_len)
            np.minimum(draft.counts, step.capacities + 1, out=draft.counts)
            controller.truncate(draft)
        else:
            draft = DraftBatch.roots(step.roots)
        controller.end(step)
        return draft

    def observe(self, step: Step) -> None:
        """A step that is not drafted for."""
        max_draft_len = self.controller.observe(step)
        self.update(step)
        if max_draft_len > 0:
            self.controller.look(self.propose(step, max_draft_len))

    def update(self, step: Step) -> None:
        """Take what requests gained. Called at every step, also at those without drafts."""

    def propose(self, step: Step, max_draft_len: int) -> DraftBatch:
        """Drafts of at most `max_draft_len` tokens per request, after `update`. The batch stays valid until the next
        call, and only its `counts` are changed by others."""
        raise NotImplementedError

    def record_acceptance(self, step: Step, rows: NDArray[np.bool_] | None = None) -> None:
        """Count what the last step gave, and what became of its drafts, for the metrics; after `draft`, `observe` or
        `update`. rows: bool [B], of requests that count; None: all."""
        some = slice(None) if rows is None else rows
        self.metrics.request_steps.inc(len(step.gained[some]))
        self.metrics.tokens.inc(int(step.gained[some].sum()))
        self.metrics.drafted.inc(int(step.drafted[some].sum()))
        self.metrics.accepted.inc(int(step.accepted[some].sum()))

    def finish(self, request_id: str, output: NDArray[np.int32] | None, aborted: bool) -> None:
        """A request has ended; ids that never began are possible.

        Args:
            output: int32 [n], what it wrote, without its prompt and without anything behind its end; None where the
                engine does not know.
            aborted: whether it was given up before its end, as far as the engine says.
        """

    def close(self) -> None:
        """Release threads and files, and save what was learnt. May be called more than once."""
        self.controller.save()

    # Corpora come over the engine's HTTP calls, in a thread of their own, where an engine has such calls.

    def add_corpus(self, corpus_id: str, documents: Sequence[NDArray[np.int32]]) -> int:
        """Index tokenised documents; `commit_corpus` makes them used. Returns their number of tokens. Raises
        ValueError: this method takes no corpora, or not this one; the message goes to the HTTP client."""
        raise ValueError("this speculative method drafts without corpora")

    def commit_corpus(self, corpus_id: str) -> None:
        """Draft from a corpus that `add_corpus` indexed, from the next step on."""
        raise ValueError("this speculative method drafts without corpora")

    def remove_corpus(self, corpus_id: str) -> None:
        """Stop drafting from a corpus. Raises ValueError if there is none of that id."""
        raise ValueError(f"there is no corpus '{corpus_id}'")

    def corpora(self) -> dict[str, int]:
        """Number of tokens of each corpus in use, by id."""
        return {}


class ModelMethod(Method, ABC):
    """A method that runs the target model to draft, for some of the requests or for all."""

    @abstractmethod
    def capacities(self, step: Step) -> NDArray[np.int32]:
        """int32 [B]: how many tokens may be drafted for each request; never more than `step.capacities`."""

    @abstractmethod
    def estimate(self, requests: int, max_draft_len: int) -> DraftPassEstimate:
        """What draft passes for this number of requests would bring and take in the step that `update` was called with;
        drafts of at most `max_draft_len` tokens."""

    @abstractmethod
    def begin_round(self, *, pays: bool) -> bool:
        """Whether draft passes are to run in the present step: because they are expected to pay, or as a trial. Called
        at most once per step."""

    @abstractmethod
    def propose_for(
        self, step: Step, rows: NDArray[np.intp], limits: NDArray[np.int32], rest: RestOfBatch
    ) -> DraftBatch:
        """Draft for the requests at `rows` of the step, after `update`; the others get their roots.

        Args:
            rows: intp [R]; limits: int32 [R], most tokens of each, none above its capacity.
            rest: the other requests of the step.
        """


@dataclass(frozen=True, slots=True)
class MethodSpec:
    """A speculative method, for all engines.

    Attributes:
        name: what the user writes as method or algorithm.
        factory: "module:class" of its `Method`, called with (options, context, controller), where controller is None
            unless the method is a part of the hybrid one and shares it.
        options: the type of its options, or what gives it when it is needed.
        check: called with (options, context) before the engine starts; raises ValueError with one clear line for what
            would fail later.
        runs_model: whether it runs the target model to draft: KV slots are reserved for it, and it gets a `DraftModel`.
        takes_corpora: whether it takes corpora over HTTP.
        schedule: called with (options, context); draft lengths by batch size, for engines that decide them beforehand.
        role: which part of the hybrid method it can be; None for neither.
        default_length: draft tokens of a request at most, where the user names no number; None if one must be named.
    """

    name: str
    factory: str
    options: type[PluginOptions] | Callable[[], type[PluginOptions]]
    check: Callable[[Any, EngineContext], None] | None = None
    runs_model: bool = False
    takes_corpora: bool = False
    schedule: Callable[[Any, EngineContext], Schedule | None] | None = None
    role: Literal["host", "model"] | None = None
    default_length: int | None = None

    @property
    def option_type(self) -> type[PluginOptions]:
        return self.options if isinstance(self.options, type) else self.options()

    def make(self, options: PluginOptions, context: EngineContext, controller: Controller | None = None) -> Any:
        """Build the `Method`. Raises ValueError where it cannot work."""
        module, _, name = self.factory.partition(":")
        return getattr(importlib.import_module(module), name)(options, context, controller)


# The registered methods by name; an engine's adapter adds those that it can serve.
METHODS: dict[str, MethodSpec] = {}


def spec_of_role(role: str) -> MethodSpec:
    """The registered method that plays a role in the hybrid one. Raises ConfigError if there is none."""
    for spec in METHODS.values():
        if spec.role == role:
            return spec
    raise ConfigError(f"no method for the part '{role}' is registered: run 'freedraft doctor'")
