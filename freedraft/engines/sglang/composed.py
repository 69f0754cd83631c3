"""Algorithm "freedraft": n-gram trees where they are confident, trees of the model's own layers where they are not.

Knows the two sources only by name, in the registry of algorithms, and by what `HostSource` and `ModelSource` ask of
them. Which requests get draft passes is decided by `Composer`, how wide the step is by the controller of the first
source; both go by its step times.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from freedraft.composer import DRAFT, NAME, Composer, check_options, merged_options, part_options, roots_only
from freedraft.composition import Outlook
from freedraft.config import PluginOptions
from freedraft.cost.controller import Controller
from freedraft.draft import DraftBatch
from freedraft.engines.sglang.registration import PARTS, install
from freedraft.engines.sglang.source import DraftSource, DraftStep, SourceContext


class HostSource(DraftSource, Protocol):
    """A source that costs no pass of the model; see `SssdSource`."""

    controller: Controller | None

    def look(self, step: DraftStep) -> None: ...

    def trees(self, step: DraftStep, width: int) -> DraftBatch: ...

    def decided(self, step: DraftStep, tree: DraftBatch, width: int) -> None: ...

    def belongs(self, request_id: str, tenant: str | None) -> None: ...

    def ended(self, request_id: str, tokens: NDArray[np.int32]) -> None: ...


class ModelSource(DraftSource, Protocol):
    """A source that runs passes of the model; see `LayerSkipSource`."""

    needs_states: bool

    def take_state(self, request_id: str, state: Any) -> None: ...

    def look(self, step: DraftStep) -> None: ...

    def priced_by(self, verify: Any) -> None: ...

    def outlook(self, batches: NDArray[np.int64], most: int) -> Outlook: ...

    def trees(
        self, step: DraftStep, chosen: NDArray[np.intp], width: int, others: tuple[int, int, float]
    ) -> DraftBatch: ...


def register() -> None:
    """Entry point of `sglang.srt.plugins`: runs in every process of SGLang."""
    install(NAME, make_source, corpora=True, runs_model=True, check_start=check_start, check_arguments=check_arguments)


@functools.cache
def option_type() -> type[PluginOptions]:
    """The options of both sources, and which ones they are. Raises ConfigError when one is not registered."""
    return merged_options({name: PARTS[name].options for name in DRAFT if name in PARTS})


def _parts() -> dict[str, PluginOptions]:
    """The options of each source, as the user set them."""
    values = option_type().read().model_dump(exclude_unset=True)
    types = {name: PARTS[name].options for name in DRAFT}
    return {name: part.parse(part_options(values, name, part)) for name, part in types.items()}


def check_start() -> None:
    """Raises ValueError for what one of the sources refuses, or what does not go together."""
    check_options(option_type().read())
    for name, options in _parts().items():
        check = PARTS[name].check_start
        if check is not None:
            check(options)


def check_arguments(args: Any) -> None:
    """Raises ValueError for arguments that one of the sources refuses."""
    for name, options in _parts().items():
        check = PARTS[name].check_arguments
        if check is not None:
            check(args, options)


def make_source(context: SourceContext) -> ComposedSource:
    host, model = (PARTS[name].make_source(context, options) for name, options in _parts().items())
    return ComposedSource(context, host, model)


class ComposedSource:
    """Two sources as one."""

    def __init__(self, context: SourceContext, host: Any, model: Any) -> None:
        """
        Args:
            host, model: see `HostSource` and `ModelSource`.

        Raises:
            ConfigError: steps of this model cannot be priced.
        """
        self.host: HostSource = host
        self.model: ModelSource = model
        self.max_nodes = context.max_nodes
        self.composer = Composer(self.host.controller, self.model.outlook)
        self.model.priced_by(self.composer.seconds)
        self._host_width = 1

    def width(self, batch_size: int) -> int:
        """The widest step, which the controller then cuts; what is asked for is decided with the requests at hand."""
        self._host_width = self.host.width(batch_size) if DRAFT[0] in self.composer.drafting else 1
        return self.max_nodes

    def draft(self, step: DraftStep, width: int) -> DraftBatch:
        composer, batch = self.composer, len(step.request_ids)
        controller = composer.controller
        composer.observe(step.request_ids, np.diff(step.offsets))
        self.host.look(step)
        self.model.look(step)
        host_width = min(self._host_width, width)
        draft = self.host.trees(step, host_width)
        if host_width == 1:
            draft = _roots(step)
        choice = composer.choose(step.request_ids, draft, np.ones(batch, np.bool_), width - 1)
        if len(choice.rows):
            started = time.perf_counter()
            passed = self.model.trees(step, choice.rows, choice.most + 1, composer.others(choice))
            passes = time.perf_counter() - started
            controller.paused(passes)
            draft, verified = composer.cut(draft, passed, choice.rows)
            host_width = width
        else:
            passes, verified = 0.0, controller.cut(draft) if host_width > 1 else 1
        composer.decided(step.request_ids, verified, passes)
        self.host.decided(step, draft, host_width)
        return draft

    def begin(self, request_id: str, tokens: NDArray[np.int32]) -> None:
        self.host.begin(request_id, tokens)
        self.model.begin(request_id, tokens)

    @property
    def needs_states(self) -> bool:
        return self.model.needs_states

    def take_state(self, request_id: str, state: Any) -> None:
        self.model.take_state(request_id, state)

    def belongs(self, request_id: str, tenant: str | None) -> None:
        self.host.belongs(request_id, tenant)

    def ended(self, request_id: str, tokens: NDArray[np.int32]) -> None:
        self.host.ended(request_id, tokens)

    def capture_graphs(self) -> None:
        for source in (self.host, self.model):
            capture = getattr(source, "capture_graphs", None)
            if capture is not None:
                capture()

    def observe(self, accepted: Sequence[int]) -> None:
        self.host.observe(accepted)

    def finish(self, request_ids: Iterable[str]) -> None:
        ids = list(request_ids)
        self.composer.finish(ids)
        self.host.finish(ids)
        self.model.finish(ids)

    def add_corpus(self, corpus_id: str, documents: Sequence[NDArray[np.int32]]) -> int:
        return self.host.add_corpus(corpus_id, documents)

    def commit_corpus(self, corpus_id: str) -> None:
        self.host.commit_corpus(corpus_id)

    def remove_corpus(self, corpus_id: str) -> None:
        self.host.remove_corpus(corpus_id)

    def corpora(self) -> dict[str, int]:
        return self.host.corpora()

    def close(self) -> None:
        self.host.close()
        self.model.close()


def _roots(step: DraftStep) -> DraftBatch:
    draft = roots_only(len(step.request_ids))
    draft.tokens[:, 0] = step.tokens[step.offsets[1:] - 1]
    return draft
