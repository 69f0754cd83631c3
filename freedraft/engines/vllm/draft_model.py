"""`PagedDraftModel`: the target as a drafter of itself, over vLLM's own weights and paged KV cache."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freedraft.draft_model import DraftModel, PassOutputs
from freedraft.engines.draft_ranks import DraftRanks
from freedraft.engines.draft_round import DraftPass
from freedraft.engines.matchness import SetScores
from freedraft.engines.vllm.draft_graphs import DraftGraphs
from freedraft.engines.vllm.draft_passes import PagedDraftRound
from freedraft.engines.vllm.forward import Forward, Pages
from freedraft.engines.vllm.kept_layers import Backbone, KeptLayers, UnsupportedModel, compiled
from freedraft.guarded_method import GuardedMethod
from freedraft.recipe import Recipe
from freedraft.step import Step

logger = logging.getLogger(__name__)


class PagedDraftModel(Forward, DraftModel):
    """Draft passes of one token per request, in vLLM's forward context, and scores of recipes.

    A pass reads the KV that the target wrote. The pass for position p writes the KV of p, which lies past the computed
    tokens in a block of the same request; the target's next step rewrites all of these positions before any pass reads
    them, and only computed tokens are prefix-cached.

    Raises:
        UnsupportedModel: the KV cache is of several kinds.
    """

    def __init__(self, runner: Any, backbone: Backbone, vllm_config: Any) -> None:
        super().__init__(runner, backbone, vllm_config)
        self.n_layers = len(backbone.layers)
        self.compiled: dict[tuple[object, ...], KeptLayers] = {}
        self.waits = self.device.type != "cpu"
        self.trees = getattr(getattr(runner, "speculator", None), "trees", None) is not None
        self.graphs: DraftGraphs | None = None

    def build(self, recipe: Recipe, outputs: PassOutputs, *, optimize: bool) -> DraftPass:
        number = self.ranks.tell("build", recipe, outputs, optimize)
        layers = self._layers(recipe.bits, outputs, optimize)
        return DraftPass(layers, recipe.window, outputs, number)

    def _layers(self, skipped: tuple[bool, ...], outputs: PassOutputs, optimize: bool) -> KeptLayers:
        if not optimize:
            return KeptLayers(self.backbone, skipped, outputs).eval()
        key = (*skipped, *outputs)  # compiled code does not depend on the window
        if key not in self.compiled:
            with self.ranks.together():  # they warm it up together
                self.compiled[key] = compiled(self.vllm_config, self.backbone, skipped, outputs)
        return self.compiled[key]

    def capture(self, table_width: int) -> None:
        """Capture CUDA graphs of the optimized passes, if vLLM captures graphs."""
        self.graphs = DraftGraphs(self, table_width)
        self.graphs.capture(self.compiled.values())

    def capacities(self, step: Step) -> NDArray[np.int32]:
        # The KV of the last of n tokens is not computed yet: a draft of k writes positions n - 1 to n + k - 2.
        pages = step.engine.pages()
        slots = pages.blocks * pages.block_size - (step.contexts - 1)
        return np.minimum(slots.clip(0), step.capacities).astype(np.int32)

    def start(self, step: Step, draft_pass: DraftPass, rows: NDArray[np.intp], max_draft_len: int) -> PagedDraftRound:
        pages, first = step.engine.pages(), step.contexts.astype(np.int64) - 1
        self.ranks.tell("start", draft_pass.number, pages.rows, first, max_draft_len)
        return PagedDraftRound(self, self.graphs, draft_pass, pages, first, max_draft_len)

    def serve(self, pages: Callable[[], Pages] | None = None) -> None:
        """Worker-rank loop: repeat rank 0's calls until it ends. pages: of the present step; None before the first
        one."""

        def start(
            draft_pass: DraftPass, rows: NDArray[np.intp], first: NDArray[np.int64], max_draft_len: int
        ) -> PagedDraftRound:
            assert pages is not None
            return PagedDraftRound(self, self.graphs, draft_pass, pages()._replace(rows=rows), first, max_draft_len)

        self.ranks.serve(self.build, start)

    def scorer(self, window: int) -> SetScores:
        most = min(self.runner.max_num_reqs, self.runner.max_num_tokens // window)
        return SetScores(self, window, max(1, most), min(window, self.runner.max_num_tokens))


def prepare_passes(runner: Any, vllm_config: Any, guarded: GuardedMethod | None) -> PagedDraftModel | None:
    """Build the draft model and its passes for a runner with a KV cache, on all ranks or on none. Returns None if it
    cannot be built. Raises UnsupportedModel, which stops the start.

    Args:
        guarded: the method that builds passes; None in worker ranks.
    """
    from vllm.distributed import get_tp_group

    try:
        # The method gets its draft model only after all ranks have built theirs.
        model = DraftRanks(get_tp_group()).ready(
            lambda: PagedDraftModel(runner, Backbone.of(runner.get_model()), vllm_config)
        )
    except UnsupportedModel:
        raise
    except Exception:  # another structure of vLLM
        logger.exception("freedraft: draft passes could not be built, so none are run; please report this")
        return None
    if guarded is None:
        model.serve()
        return model
    with model.ranks.leading():
        guarded.prepare(model)
    return model
