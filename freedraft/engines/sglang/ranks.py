"""Broadcasts of draft trees and verification results between tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from freedraft_kernels import Verification

from freedraft.draft import DraftBatch
from freedraft.engines.draft_ranks import DraftRanks


class Ranks(DraftRanks):
    """Rank 0 decides for all ranks. max_nodes: N, maximum nodes of a tree."""

    def __init__(self, group: Any, max_nodes: int) -> None:
        super().__init__(group)
        self._max_nodes = max_nodes

    def share_draft(self, draft: DraftBatch | None, batch_size: int) -> DraftBatch:
        """Broadcast rank 0's trees, without scores and kinds.

        One int32 array over the CPU group: width n, counts [B], then tokens, parents and depths [B, n]. It has room for
        n = N, so that the other ranks need not know n."""
        if not self.several:
            assert draft is not None
            return draft
        packed = np.empty(1 + batch_size * (1 + 3 * self._max_nodes), np.int32)
        if draft is not None:
            flat = (draft.counts, draft.tokens.ravel(), draft.parents.ravel(), draft.depths.ravel())
            used = 1 + sum(map(len, flat))
            packed[0] = draft.max_nodes
            np.concatenate(flat, out=packed[1:used])
            packed[used:] = 0
        torch.distributed.broadcast(torch.from_numpy(packed), src=self._group.ranks[0], group=self._group.cpu_group)
        if draft is not None:
            return draft
        width = int(packed[0])
        counts, nodes = np.split(packed[1 : 1 + batch_size * (1 + 3 * width)], [batch_size])
        shared = DraftBatch.empty(batch_size, width)
        shared.counts[:] = counts
        shared.tokens[:], shared.parents[:], shared.depths[:] = nodes.reshape(3, batch_size, width)
        return shared

    def share_outcome(self, verified: Verification) -> Verification:
        """Broadcast rank 0's result: logits of ranks may differ in the last bit, and so may their draws."""
        if not self.several:
            return verified
        width = verified.tokens.shape[1]
        flat = torch.cat((verified.accepted, verified.tokens, verified.lengths[:, None]), 1)
        accepted, tokens, lengths = self._group.broadcast(flat, src=0).split((width, width, 1), 1)
        return Verification(accepted.contiguous(), lengths.squeeze(1).contiguous(), tokens.contiguous())
