"""`PagedDraftRound`: draft passes of one step over vLLM's paged KV cache, written to reserved slots only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from freedraft.draft_model import Drafted, DraftRound
from freedraft.engines.vllm.v1.kept_layers import KeptLayers
from freedraft.method import Step

if TYPE_CHECKING:
    from freedraft.engines.vllm.v1.draft_model import PagedDraftModel


class PagedDraftRound(DraftRound):
    """See `DraftModel.start`, whose arguments these are. What a pass gives comes to the host in one transfer."""

    def __init__(self, model: PagedDraftModel, step: Step, rows: NDArray[np.intp], max_draft_len: int) -> None:
        self.model = model
        batch_rows = step.engine.rows[rows]
        self.first = np.zeros(step.batch_size, np.int64)  # position of each request's root
        self.first[rows] = step.contexts[rows].astype(np.int64) - 1
        table = model.block_table
        positions = self.first[rows] + np.arange(max_draft_len, dtype=np.int64)[:, None]
        # Requests with less capacity than others leave the round before they come to positions past their blocks.
        blocks = np.minimum(positions // table.block_size, table.block_table.np.shape[1] - 1)
        self.slots = np.zeros((max_draft_len, step.batch_size), np.int64)
        self.slots[:, rows] = table.block_table.np[batch_rows, blocks].astype(np.int64) * table.block_size
        self.slots[:, rows] += positions % table.block_size
        self.batch_rows = step.engine.rows
        self.all_pages = step.engine.arguments["common_attn_metadata"].block_table_tensor
        self.pages: tuple[bytes, torch.Tensor] = b"", self.all_pages

    @torch.inference_mode()
    def run(self, draft_pass: KeptLayers, rows: NDArray[np.intp], tokens: NDArray[np.int32], position: int) -> Drafted:
        model, n, k = self.model, len(rows), draft_pass.top_k
        positions = self.first[rows] + position
        inputs = model.tensor(np.stack((tokens, positions, self.slots[position, rows])))
        output = model.run(
            draft_pass,
            inputs[0],
            positions=inputs[1],
            slots=inputs[2],
            lengths=(positions + 1).astype(np.int32),
            starts=(model.starts[: n + 1], model.starts_cpu[: n + 1]),
            pages=self._pages(rows),
            draft_index=position,
        )
        values = output.cpu().numpy()
        return Drafted(
            values[:, :k].astype(np.int32), values[:, k : 2 * k], values[:, 2 * k] if draft_pass.entropy else None
        )

    def _pages(self, rows: NDArray[np.intp]) -> torch.Tensor:
        """int32 [R, P]: block tables of these requests, gathered again only when they change."""
        key = rows.tobytes()
        if self.pages[0] != key:
            batch_rows = self.batch_rows[rows]
            whole = np.array_equal(batch_rows, np.arange(len(batch_rows)))
            pages = self.all_pages
            self.pages = key, pages[: len(rows)] if whole else pages[self.model.tensor(batch_rows)]
        return self.pages[1]
