"""Drafts of model runner V2 on their way to the device: tokens and ancestor masks; and `Confidences`: acceptance
probabilities of draft tokens, for vLLM's adaptive verification."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from freedraft.compiled import compiled
from freedraft.cost.acceptance import Acceptance
from freedraft.draft import DraftBatch
from freedraft.step import Step


def write_drafts(
    draft: DraftBatch | None,
    capacities: NDArray[np.int32],
    rows: NDArray[np.intp],
    branches: NDArray[np.bool_] | None,
    proposed: NDArray[np.int64],
    parents: NDArray[np.int32],
    slots: NDArray[np.int32],
) -> NDArray[np.int32]:
    """Write drafts into rows of `proposed`; return int32 [R], draft tokens of each request.

    Args:
        draft: of R requests, or None; nodes of a tree by descending score. capacities: int32 [R], most draft tokens of
            each.
        branches: bool [R], whether a request may have a tree; others keep the chain of first children. None: no request
            may.
        proposed: int64 [1 or 2, B, K], out: tokens, and masks (`NodeMasks`) if there may be trees; prefilled with each
            request's newest token and 0.
        parents: int32 [slots, K + 1], out, by `slots`: int32 [R].
    """
    counts = np.zeros(len(rows), np.int32)
    if draft is not None:
        length = parents.shape[1] - 1
        _write(
            draft.tokens,
            draft.parents,
            np.minimum(np.minimum(draft.counts - 1, capacities), length).clip(0).astype(np.int32),
            rows,
            np.zeros(len(rows), np.bool_) if branches is None else branches,
            proposed[0],
            proposed[-1],
            parents,
            slots,
            counts,
        )
    return counts


@compiled
def _write(tokens, parents, limits, rows, branches, out, masks, out_parents, slots, counts):
    for b in range(len(rows)):
        row, slot = rows[b], slots[b]
        out_parents[slot, 0] = -1
        kept, last = 0, 0
        for node in range(1, limits[b] + 1):
            if not branches[b]:
                if parents[b, node] != last:
                    continue
                last = node
            out[row, kept] = tokens[b, node]
            parent = parents[b, node] if branches[b] else kept
            out_parents[slot, kept + 1] = parent
            if branches[b]:
                above = masks[row, parent - 1] if parent > 0 else np.int64(0)
                masks[row, kept] = above | (np.int64(1) << np.int64(kept))
            kept += 1
        counts[b] = kept


class Confidences:
    """Probability that each draft token is accepted if its predecessors are; 0 for no token. B requests, K = most draft
    tokens of a request. device: float32 [slots, K], by row of the batch, read by vLLM; host: the same, pinned.
    """

    def __init__(self, slots: int, length: int, device: torch.device) -> None:
        self._acceptance = Acceptance()
        self.host = torch.zeros(slots, length, dtype=torch.float32, pin_memory=device.type != "cpu")
        self.device = torch.zeros(slots, length, dtype=torch.float32, device=device)

    def learn(self, step: Step) -> None:
        """Learn the outcome of the last draft, whose arrays must not have changed."""
        self._acceptance.update(step)

    def estimate(self, draft: DraftBatch | None, rows: NDArray[np.intp], counts: NDArray[np.int32], batch: int) -> None:
        """Write the probabilities of a draft. draft: of R requests; None if drafting failed; rows: intp [R], the
        requests' rows of the batch; counts: int32 [R], draft tokens of each; batch: B."""
        host = self.host[:batch].numpy()
        host[:] = 0.0
        if draft is not None:
            p = self._acceptance.probabilities(draft)[:, : 1 + host.shape[1]]
            given = (p[:, 1:] / np.maximum(p[:, :-1], 1e-9)).clip(0.0, 1.0)
            width = given.shape[1]
            host[rows, :width] = np.where(np.arange(width) < counts[:, None], given, 0.0)
            self._acceptance.follow(draft)

    def send(self, batch: int) -> None:
        """Start the copy to the device."""
        self.device[:batch].copy_(self.host[:batch], non_blocking=True)
