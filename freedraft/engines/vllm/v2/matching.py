"""Verification in vLLM's model runner V2: vLLM's own sampler draws a token after every node of a draft, with the noise
of its request and position; the path of draft tokens equal to the drawn ones is accepted.

So a request gets the same tokens as without drafts, seed by seed. A draft token is accepted with its probability, as in
rejection sampling of deterministic drafts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from freedraft_kernels import TreeBatch, Verification, verify

# Arguments of RejectionSampler._verify that Sampler.sample takes, in its order
_SAMPLED_BY = (
    "logits",
    "expanded_idx_mapping",
    "idx_mapping",
    "idx_mapping_np",
    "pos",
    "draft_sampled",
    "expanded_local_pos",
    "seq_lens_upper_bound_np",
)


class Outcome(NamedTuple):
    """The outcome of B requests with R rows of logits, at most N per request.

    Attributes:
        logits: float [R, V], processed.
        verification: of the B drafts; N nodes each.
        rows: int64 [B, N], each node's row of logits; the last one beyond a request's nodes.
        inside: bool [B, N], which are nodes.
    """

    logits: torch.Tensor
    verification: Verification
    rows: torch.Tensor
    inside: torch.Tensor

    def sampled(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The result of vLLM's `_verify`: processed logits; int64 [B, N], tokens; int32 [B], their number."""
        return self.logits, self.verification.tokens.long(), self.verification.lengths


def match(
    sampler: Any, given: dict[str, Any], parents: torch.Tensor | None = None, counts: torch.Tensor | None = None
) -> Outcome:
    """Draw tokens, and accept draft tokens that are equal.

    Args:
        sampler: vLLM's RejectionSampler; given: arguments of its `_verify`, `pos` the position of each row's token.
        parents: int32 [R], parent of each row's node, -1 for roots; counts: int32 [B], nodes of each request. Both None
            for chains.
    """
    targets, logits = sampler.sampler.sample(*(given[name] for name in _SAMPLED_BY), return_logprobs=True)
    offsets = given["cu_num_logits"].long()[:, None]
    starts, ends = offsets[:-1], offsets[1:]
    column = torch.arange(1 + sampler.num_speculative_steps, device=logits.device)
    rows = torch.minimum(starts + column, ends - 1)
    drafted = given["verify_draft_sampled"][rows]  # -1: not acceptable
    chain = column.int().expand_as(drafted).contiguous()
    tree = TreeBatch(
        drafted,
        chain - 1 if parents is None else parents[rows],
        chain,
        (ends - starts)[:, 0].int() if counts is None else counts,
    )
    return Outcome(logits, verify(tree, targets[rows]), rows, starts + column < ends)
