"""Broadcasts of draft trees and verification results between tensor-parallel ranks."""

from __future__ import annotations

import torch
from freedraft_kernels import Verification

from freedraft.draft import DraftBatch
from freedraft.engines.draft_ranks import DraftRanks


class Ranks(DraftRanks):
    """Rank 0 decides for all ranks."""

    def share_draft(self, draft: DraftBatch | None) -> DraftBatch:
        """Broadcast rank 0's trees between the hosts, whose launches depend on their width: by SGLang's message queue,
        in shared memory."""
        shared: DraftBatch = self._group.broadcast_object(draft, src=0)  # with one rank, the argument
        return shared

    def share_outcome(self, verified: Verification) -> Verification:
        """Broadcast rank 0's result: logits of ranks may differ in the last bit, and so may their draws."""
        if not self.several:
            return verified
        width = verified.tokens.shape[1]
        flat = torch.cat((verified.accepted, verified.tokens, verified.lengths[:, None]), 1)
        accepted, tokens, lengths = self._group.broadcast(flat, src=0).split((width, width, 1), 1)
        return Verification(accepted.contiguous(), lengths.squeeze(1).contiguous(), tokens.contiguous())
