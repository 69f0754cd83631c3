"""Verification in vLLM's model runner V2: vLLM's own sampler draws a token after every node of a draft, with the noise
of its request and position; the path of draft tokens equal to the drawn ones is accepted.

So a request gets the same tokens as without drafts, seed by seed. A draft token is accepted with its probability, as in
rejection sampling of deterministic drafts.
"""

from __future__ import annotations

from typing import Any

import torch
from freedraft_kernels import KVPool, verify_rows

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


def match(
    sampler: Any, given: dict[str, Any], trees: tuple[torch.Tensor, ...] | None = None, pool: KVPool | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw tokens, accept draft tokens that are equal, and move the KV of trees' accepted paths. sampler: vLLM's
    RejectionSampler; given: arguments of its `_verify`, `pos` the position of each row's token; trees: see
    `verify_rows`. Returns the result of `_verify`: processed logits, float [R, V]; int64 [B, N], tokens; int32 [B],
    their number."""
    targets, logits = sampler.sampler.sample(*(given[name] for name in _SAMPLED_BY), return_logprobs=True)
    nodes = 1 + sampler.num_speculative_steps
    outcome, slots = verify_rows(given["verify_draft_sampled"], targets, given["cu_num_logits"], nodes, trees)
    if pool is not None:
        pool.compact(slots, outcome)
    return logits, outcome.tokens, outcome.lengths
