"""`PagedDraftRound`: draft passes of one step over vLLM's paged KV cache, written to reserved slots only."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from freedraft.draft_model import Drafted, DraftRound, Window
from freedraft.engines.vllm.kept_layers import KeptLayers
from freedraft.method import Step

if TYPE_CHECKING:
    from freedraft.engines.vllm.draft_model import PagedDraftModel


class DraftPass(NamedTuple):
    """Layers, and the part of the KV cache that they read; None for the whole cache."""

    layers: KeptLayers
    window: Window | None


class BlockTables(NamedTuple):
    """What passes over some of a step's requests read and write.

    Attributes:
        key: which requests, through which window.
        whole: int32 [R, P], blocks of their KV; read: int32 [R, P'], those that attention reads.
        dropped: int64 [R], tokens of each that lie in between and are not read.
    """

    key: tuple[bytes, Window | None]
    whole: torch.Tensor
    read: torch.Tensor
    dropped: NDArray[np.int64]


class PagedDraftRound(DraftRound):
    """See `DraftModel.start`, whose arguments these are. What a pass gives comes to the host in one transfer.

    A window shortens what attention reads: the block tables, and the sequence lengths by what is left out. Positions
    stay, with which keys were rotated when they were written, and so do the slots that are written.
    """

    def __init__(self, model: PagedDraftModel, step: Step, rows: NDArray[np.intp], max_draft_len: int) -> None:
        self.model, self.max_draft_len = model, max_draft_len
        self.first = step.contexts.astype(np.int64) - 1  # position of each request's root
        self.pages = step.engine.pages()
        self.tables: BlockTables | None = None

    @torch.inference_mode()
    def run(self, draft_pass: DraftPass, rows: NDArray[np.intp], tokens: NDArray[np.int32], position: int) -> Drafted:
        model, n, (layers, window) = self.model, len(rows), draft_pass
        k, size = layers.top_k, self.pages.block_size
        positions = self.first[rows] + position
        inputs, tables = model.tensor(np.stack((tokens, positions))), self._tables(rows, window)
        blocks = tables.whole.gather(1, (inputs[1] // size)[:, None])[:, 0].long()
        slots = blocks * size + inputs[1] % size
        lengths = (positions + 1 - tables.dropped).astype(np.int32)
        output = None if model.graphs is None else model.graphs.run(layers, tables, inputs, slots, lengths)
        if output is None:
            output = model.run(
                layers,
                inputs[0],
                positions=inputs[1],
                slots=slots,
                lengths=lengths,
                starts=(model.starts[: n + 1], model.starts_cpu[: n + 1]),
                pages=tables.read,
                draft_index=position,
            )
        values = output.cpu().numpy()
        return Drafted(
            values[:, :k].astype(np.int32), values[:, k : 2 * k], values[:, 2 * k] if layers.entropy else None
        )

    def _tables(self, rows: NDArray[np.intp], window: Window | None) -> BlockTables:
        """Of these requests, made again only when they or the window change."""
        key = rows.tobytes(), window
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
        """The block tables that a window leaves, and how many tokens it leaves out."""
        size, longest = self.pages.block_size, self.max_draft_len
        sinks, dropped = window.pages(first, size, attended=self.model.attended, max_draft_len=longest)
        used = (first + longest - 1) // size + 1 - dropped
        places = np.arange(used.max())
        places = np.minimum(np.where(places < sinks[:, None], places, places + dropped[:, None]), whole.shape[1] - 1)
        return whole.gather(1, self.model.tensor(places)), dropped * size
