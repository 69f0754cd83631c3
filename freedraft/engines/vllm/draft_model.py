"""`PagedDraftModel`: the target as a drafter of itself, over vLLM's own weights and paged KV cache; `PagedDraftRound`:
its passes of one step, which write to reserved slots only."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from freedraft.draft_model import DraftModel, PassOutputs, Recipe, Window
from freedraft.engines.draft_round import DraftPass, DraftRanks, RankedRound
from freedraft.engines.matchness import SetScores
from freedraft.engines.vllm.draft_graphs import DraftGraphs
from freedraft.engines.vllm.forward import BlockTables, Forward, Pages, PassInputs
from freedraft.engines.vllm.kept_layers import Backbone, KeptLayers, UnsupportedModel, compiled
from freedraft.guarded_method import GuardedMethod
from freedraft.step import Step


class PagedDraftRound(RankedRound):
    """See `DraftModel.start`.

    A window shortens the block tables and sequence lengths that attention reads. Positions, with which keys were
    rotated, and the slots to write stay as they are.

    Args:
        first: int64 [B], position of each request's root.
    """

    def __init__(
        self, model: Forward, graphs: DraftGraphs | None, draft_pass: DraftPass, pages: Pages, first: NDArray[np.int64],
        max_draft_len: int,
    ) -> None:  # fmt: skip
        super().__init__(model.ranks, draft_pass, max_draft_len)
        self.model, self.graphs, self.pages, self.first = model, graphs, pages, first
        self.tables: BlockTables | None = None

    @torch.inference_mode()
    def launch(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        return super().launch(*args, **kwargs)

    def _ready(self, rows: NDArray[np.intp], tokens: NDArray[np.int32], position: int) -> PassInputs:
        positions, tables = self.first[rows] + position, self._tables(rows)
        lengths = (positions + 1 - tables.dropped).astype(np.int32)
        inputs = self.model.tensor(np.stack((tokens, positions)))
        return PassInputs(tables, inputs, self._slots(tables, inputs[1]), lengths, self.model.tensor(lengths), position)

    def _next(self, ready: PassInputs, tokens: torch.Tensor) -> PassInputs:
        positions = ready.inputs[1] + 1
        return ready._replace(
            inputs=torch.stack((tokens, positions)),
            slots=self._slots(ready.tables, positions),
            lengths=ready.lengths + 1,
            lengths_on_device=ready.lengths_on_device + 1,
            position=ready.position + 1,
        )

    def _slots(self, tables: BlockTables, positions: torch.Tensor) -> torch.Tensor:
        size = self.pages.block_size
        return tables.whole.gather(1, (positions // size)[:, None])[:, 0].long() * size + positions % size

    def _output(self, ready: PassInputs) -> torch.Tensor:
        model, layers = self.model, self.draft_pass.layers
        output = None if self.graphs is None else self.graphs.run(layers, ready)
        if output is not None:
            return output
        return model.run(
            layers,
            ready.inputs[0],
            positions=ready.inputs[1],
            slots=ready.slots,
            lengths=ready.lengths,
            lengths_on_device=ready.lengths_on_device,
            pages=ready.tables.read,
            draft_index=ready.position,
        )

    def _tables(self, rows: NDArray[np.intp]) -> BlockTables:
        key, window = rows.tobytes(), self.draft_pass.window
        if self.tables is None or self.tables.key != key:
            batch_rows, table = self.pages.rows[rows], self.pages.table
            first_rows = np.array_equal(batch_rows, np.arange(len(batch_rows)))
            whole = table[: len(rows)] if first_rows else table[self.model.tensor(batch_rows)]
            if window is None:
                self.tables = BlockTables(key, whole, whole, np.zeros(len(rows), np.int64))
            else:
                self.tables = BlockTables(key, whole, *self._cut(whole, self.first[rows], window))
        return self.tables

    def _cut(
        self, whole: torch.Tensor, first: NDArray[np.int64], window: Window
    ) -> tuple[torch.Tensor, NDArray[np.int64]]:
        """Block tables of a window, and the number of tokens that it leaves out."""
        size, longest = self.pages.block_size, self.max_draft_len
        sinks, dropped = window.pages(first, size, attended=self.model.attended, max_draft_len=longest)
        used = (first + longest - 1) // size + 1 - dropped
        places = np.arange(min(used.max(), whole.shape[1]))  # other requests may have slots for longer drafts
        places = np.minimum(np.where(places < sinks[:, None], places, places + dropped[:, None]), whole.shape[1] - 1)
        return whole.gather(1, self.model.tensor(places)), dropped * size


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
        key = (*recipe.bits, *outputs)  # compiled code does not depend on the window
        if optimize and key not in self.compiled:
            with self.ranks.together():  # they warm it up together
                self.compiled[key] = compiled(self.vllm_config, self.backbone, recipe.bits, outputs)
        layers = self.compiled[key] if optimize else KeptLayers(self.backbone, recipe.bits, outputs).eval()
        return DraftPass(layers, recipe.window, outputs, number)

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
    with model.ranks.leading(), guarded:
        guarded.method.prepare(model)
    return model
