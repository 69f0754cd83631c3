"""Method "freedraft": n-gram drafts where they are confident, drafts of the model's own layers where they are not.

Knows the two drafters only by name, in the registry of methods, and by what `HostDrafter` and `ModelDrafter` ask of
them. Which requests get draft passes is decided by `Composer`, how much is verified by the controller of the first
drafter; both go by its step times.
"""

from __future__ import annotations

import copy
import functools
import importlib
import time
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from freedraft.composer import DRAFT, NAME, Composer, check_options, merged_options, part_options, roots_only
from freedraft.composition import Outlook
from freedraft.config import PluginOptions
from freedraft.cost.controller import Controller
from freedraft.draft import DraftBatch
from freedraft.engines.vllm.hooks import MODEL_DRAFT_HOOKS
from freedraft.engines.vllm.methods import CONFIG_KEY, METHODS, Method, method_options
from freedraft.engines.vllm.methods import register as register_method
from freedraft.engines.vllm.runner import Step, StepProposer


class HostDrafter(Protocol):
    """A drafter that costs no pass of the model."""

    controller: Controller | None

    def chains(self, step: Step, most: int) -> DraftBatch:
        """Chains of at most `most` draft tokens, in the order of `step.rows`; valid until the next call."""

    def note(self, drafted: int, accepted: int) -> None:
        """Count draft tokens of this drafter that were verified."""


class ModelDrafter(Protocol):
    """A drafter that runs passes of the model; see `LayerSkipProposer`, whose methods these are."""

    def priced_by(self, verify: Any) -> None: ...

    def look(self, step: Step) -> None: ...

    def room(self, step: Step) -> NDArray[np.int32]: ...

    def outlook(self, batches: NDArray[np.int64], most: int) -> Outlook: ...

    def chains(
        self, step: Step, chosen: NDArray[np.intp], room: NDArray[np.int32], others: tuple[int, int, float]
    ) -> Any: ...

    def judge(
        self, step: Step, rows: NDArray[np.intp], drafted: NDArray[np.int32], accepted: NDArray[np.int32]
    ) -> None: ...


def register() -> None:
    """Entry point of `vllm.general_plugins`: runs in every process of vLLM."""
    register_method(
        Method(
            NAME,
            f"{__name__}.ComposedProposer",
            option_type,
            check_start,
            check_engine=check_engine,
            writes_kv=True,
            hooks=MODEL_DRAFT_HOOKS,
        )
    )


@functools.cache
def option_type() -> type[PluginOptions]:
    """The options of both drafters, and which ones they are. Raises ConfigError when one is not registered."""
    return merged_options({name: METHODS[name].option_type() for name in DRAFT if name in METHODS})


def check_engine(engine_args: Any) -> None:
    """Raises ValueError for what one of the drafters refuses."""
    for name in DRAFT:
        check = METHODS[name].check_engine
        if check is not None:
            check(engine_args)


def check_start(options: Any, model_config: Any) -> None:
    """Raises ValueError for what one of the drafters refuses, or what does not go together."""
    check_options(options)
    values = options.model_dump(mode="json", exclude_none=True)
    for name in DRAFT:
        check, part = METHODS[name].check, METHODS[name].option_type()
        if check is not None:
            check(part.parse(part_options(values, name, part)), model_config)


class ComposedProposer(StepProposer):
    """The proposer that vLLM creates for `{"method": "freedraft"}`."""

    writes_kv: ClassVar[bool] = True

    def __init__(self, vllm_config: Any) -> None:
        super().__init__(vllm_config)
        host, model = (_part(vllm_config, name) for name in DRAFT)
        self.parts: tuple[StepProposer, ...] = host, model
        self.host: HostDrafter = host
        self.model: ModelDrafter = model
        self.composer = Composer(self.host.controller, self.model.outlook)
        self.model.priced_by(self.composer.seconds)
        self.by_model: set[str] = set()

    def load_model(self, target_model: Any) -> None:
        for part in self.parts:
            part.load_model(target_model)

    def ready(self, runner: Any) -> None:
        for part in self.parts:
            part.ready(runner)

    def begin(self, request_id: str, tokens: NDArray[np.int32]) -> None:
        for part in self.parts:
            part.begin(request_id, tokens)

    def belongs(self, request_id: str, salt: str) -> None:
        for part in self.parts:
            part.belongs(request_id, salt)

    def finish(self, request_ids: set[str]) -> None:
        self.by_model -= request_ids
        self.composer.finish(request_ids)
        for part in self.parts:
            part.finish(request_ids)

    def draft(self, step: Step) -> list[list[int]]:
        controller = self.composer.controller
        step.tell(controller)
        self._judge(step)
        self.model.look(step)
        drafts = self._drafts(step) if len(step.rows) else None
        controller.end(step.request_ids)
        return step.no_drafts() if drafts is None else drafts

    def _drafts(self, step: Step) -> list[list[int]] | None:
        composer, most, request_ids = self.composer, step.max_draft_tokens, step.request_ids
        controller = composer.controller
        limit = controller.limit(len(step.rows), most) if DRAFT[0] in composer.drafting else 0
        chains = self.host.chains(step, limit) if limit else roots_only(len(step.rows))
        room = self.model.room(step)
        choice = composer.choose(request_ids, chains, room > 0, most)
        rows = choice.rows
        if not len(rows):
            verified = controller.cut(chains) if limit else 0
            composer.decided(request_ids, verified, 0.0)
            return step.drafts(chains) if verified else None
        started = time.perf_counter()
        made = self.model.chains(step, rows, np.minimum(room[rows], choice.most), composer.others(choice))
        passes = time.perf_counter() - started
        controller.paused(passes)
        composed, verified = composer.cut(chains, _draft_of(made, rows, len(step.rows)), rows)
        composer.decided(request_ids, verified, passes)
        self.by_model = {request_ids[i] for i in rows.tolist()}
        return step.drafts(composed) if verified else None

    def _judge(self, step: Step) -> None:
        """Tell each drafter what became of its drafts."""
        drafted, accepted = step.verdicts()
        self.composer.observe(step.request_ids, accepted + 1)
        by_model = np.fromiter((i in self.by_model for i in step.request_ids), np.bool_, len(drafted))
        self.by_model = set()
        rows = np.flatnonzero(by_model)
        if len(rows):
            self.model.judge(step, rows, drafted[rows], accepted[rows])
        self.host.note(int(drafted[~by_model].sum()), int(accepted[~by_model].sum()))


def _part(vllm_config: Any, name: str) -> Any:
    """The proposer of a drafter, which sees its own options only."""
    config = copy.copy(vllm_config)
    options = part_options(method_options(vllm_config), name, METHODS[name].option_type())
    config.additional_config = {**vllm_config.additional_config, CONFIG_KEY: options}
    module, _, kind = METHODS[name].proposer.rpartition(".")
    return getattr(importlib.import_module(module), kind)(config)


def _draft_of(made: Any, rows: NDArray[np.intp], batch: int) -> DraftBatch:
    """Chains of some requests as a `DraftBatch` of all."""
    width = made.tokens.shape[1]
    draft = DraftBatch.empty(batch, width + 1)
    draft.tokens[rows, 1:] = made.tokens
    draft.parents[:] = np.arange(-1, width)
    draft.depths[:] = np.arange(width + 1)
    draft.scores[:, 0] = 1.0
    draft.scores[rows, 1:] = np.cumprod(made.scores, 1)
    draft.counts[:] = 1
    draft.counts[rows] = made.counts + 1
    return draft
