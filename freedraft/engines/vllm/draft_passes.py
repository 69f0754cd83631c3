"""`PagedDraftRound`: draft passes of one step over vLLM's paged KV cache, written to reserved slots only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from freedraft.draft_model import Drafted, DraftRound
from freedraft.engines.vllm.kept_layers import KeptLayers
from freedraft.method import Step

if TYPE_CHECKING:
    from freedraft.engines.vllm.draft_model import PagedDraftModel


class PagedDraftRound(DraftRound):
    """See `DraftModel.start`, whose arguments these are. What a pass gives comes to the host in one transfer."""

    def __init__(self, model: PagedDraftModel, step: Step, rows: NDArray[np.intp], max_draft_len: int) -> None:
        self.model = model
        self.first = step.contexts.astype(np.int64) - 1  # position of each request's root
        self.pages = step.engine.pages()
        self.gathered: tuple[bytes, torch.Tensor] = b"", self.pages.table

    @torch.inference_mode()
    def run(self, draft_pass: KeptLayers, rows: NDArray[np.intp], tokens: NDArray[np.int32], position: int) -> Drafted:
        model, n, k = self.model, len(rows), draft_pass.top_k
        positions = self.first[rows] + position
        inputs, pages, size = model.tensor(np.stack((tokens, positions))), self._pages(rows), self.pages.block_size
        blocks = pages.gather(1, (inputs[1] // size)[:, None])[:, 0].long()
        output = model.run(
            draft_pass,
            inputs[0],
            positions=inputs[1],
            slots=blocks * size + inputs[1] % size,
            lengths=(positions + 1).astype(np.int32),
            starts=(model.starts[: n + 1], model.starts_cpu[: n + 1]),
            pages=pages,
            draft_index=position,
        )
        values = output.cpu().numpy()
        return Drafted(
            values[:, :k].astype(np.int32), values[:, k : 2 * k], values[:, 2 * k] if draft_pass.entropy else None
        )

    def _pages(self, rows: NDArray[np.intp]) -> torch.Tensor:
        """int32 [R, P]: block tables of these requests, gathered again only when they change."""
        key = rows.tobytes()
        if self.gathered[0] != key:
            batch_rows, table = self.pages.rows[rows], self.pages.table
            whole = np.array_equal(batch_rows, np.arange(len(batch_rows)))
            self.gathered = key, table[: len(rows)] if whole else table[self.model.tensor(batch_rows)]
        return self.gathered[1]
