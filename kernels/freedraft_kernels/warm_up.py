"""`warm_up`: kernels are compiled before the first step needs them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from freedraft_kernels.dispatch import use_triton
from freedraft_kernels.inputs import tree_inputs
from freedraft_kernels.kv_pool import KVPool
from freedraft_kernels.probs import target_probs
from freedraft_kernels.top_tokens import top_tokens
from freedraft_kernels.tree import TreeBatch
from freedraft_kernels.verification import verify_greedy, verify_sampled


def warm_up(
    widths: Sequence[int],
    max_batch: int,
    logits: torch.Tensor,
    *,
    top: int,
    pool: KVPool | None = None,
    slot: int = 0,
) -> None:
    """Run what steps of trees run, so that no step waits for a compiler; nothing where Triton does not run.

    Args:
        widths: numbers of nodes per request that steps have.
        max_batch: most requests of a step.
        logits: float [1, V], of the type that the target gives.
        top: likeliest tokens that are kept of each node.
        pool: which accepted paths are compacted in; `slot` of it may be written.
    """
    device, vocab = logits.device, logits.shape[1]
    if not use_triton(device):
        return
    powers = [1 << i for i in range((max_batch - 1).bit_length() + 1)]  # of which the mask's kernel has one each
    for nodes in widths:
        for batch in reversed(powers):
            none = np.zeros((batch, nodes), np.int32)
            tree = TreeBatch.from_numpy(none, none - 1, none, np.ones(batch, np.int32), device)
            lengths = torch.zeros(batch, dtype=torch.int64, device=device)
            tree_inputs(tree, lengths, layout="full", seq_lens_sum=0)
        # What is left is the tree of one request; the other kernels are the same for all batches.
        rows = logits.expand(nodes, vocab).contiguous()
        top_tokens(rows, top)
        verified = verify_greedy(tree, rows.argmax(-1)[None])
        one = torch.ones(1, device=device)
        probs = target_probs(rows[None], one, top_ks=one.int(), top_ps=one, min_ps=one, counts=tree.counts)
        verify_sampled(tree, probs, lengths, lengths)
        if pool is not None:
            pool.compact(torch.full((1, nodes), slot, dtype=torch.int64, device=device), verified)
