"""`PagedDraftRound`: draft passes of one step over vLLM's paged KV cache, written to reserved slots only."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from freedraft.engines.draft_round import DraftPass, RankedRound
from freedraft.engines.vllm.draft_graphs import DraftGraphs
from freedraft.engines.vllm.forward import BlockTables, Forward, Pages
from freedraft.recipe import Window


class _Ready(NamedTuple):
    """Inputs of a pass over R requests. inputs: int64 [2, R], tokens and positions; slots: int64 [R], KV slots to
    write; lengths: int32 [R], tokens that attention reads, on the host and on the device; position: in the drafts."""

    tables: BlockTables
    inputs: torch.Tensor
    slots: torch.Tensor
    lengths: NDArray[np.int32]
    lengths_on_device: torch.Tensor
    position: int


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

    def _ready(self, rows: NDArray[np.intp], tokens: NDArray[np.int32], position: int) -> _Ready:
        positions, tables = self.first[rows] + position, self._tables(rows)
        lengths = (positions + 1 - tables.dropped).astype(np.int32)
        inputs = self.model.tensor(np.stack((tokens, positions)))
        return _Ready(tables, inputs, self._slots(tables, inputs[1]), lengths, self.model.tensor(lengths), position)

    def _next(self, ready: _Ready, tokens: torch.Tensor) -> _Ready:
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

    def _output(self, ready: _Ready) -> torch.Tensor:
        model, layers = self.model, self.draft_pass.layers
        if self.graphs is not None:
            output = self.graphs.run(layers, ready.tables, ready.inputs, ready.slots, ready.lengths_on_device)
            if output is not None:
                return output
        eager: torch.Tensor = model.run(
            layers,
            ready.inputs[0],
            positions=ready.inputs[1],
            slots=ready.slots,
            lengths=ready.lengths,
            lengths_on_device=ready.lengths_on_device,
            pages=ready.tables.read,
            draft_index=ready.position,
        )
        return eager

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
