"""`warm_up` and `warm_up_verification`: kernels are compiled before the first step needs them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from freedraft_kernels.dispatch import use_triton
from freedraft_kernels.inputs import tree_inputs
from freedraft_kernels.kv_pool import KVPool
from freedraft_kernels.top_tokens import top_tokens
from freedraft_kernels.tree import TreeBatch
from freedraft_kernels.verification import verify


def warm_up(
    widths: Sequence[int], max_batch: int, logits: Tensor, *, top: int, pool: KVPool | None = None, slot: int = 0
) -> None:
    """Run what steps of trees run, so that no step waits for a compiler; nothing where Triton does not run.

    Args:
        widths: numbers of nodes per request that steps have.
        logits: float [1, V], of the type that the target gives.
        top: likeliest tokens that are kept of each node.
        pool: which accepted paths are compacted in; `slot` of it may be written.
    """
    device = logits.device
    if not use_triton(device):
        return
    powers = [1 << i for i in range((max_batch - 1).bit_length() + 1)]  # of which the mask's kernel has one each
    for nodes in widths:
        for batch in powers:
            lengths = torch.zeros(batch, dtype=torch.int64, device=device)
            tree_inputs(_roots(batch, nodes, device), lengths, layout="full", seq_lens_sum=0)
    top_tokens(logits, top)
    warm_up_verification(widths, device, pool=pool, slot=slot)


def warm_up_verification(
    widths: Iterable[int], device: torch.device, *, pool: KVPool | None = None, slot: int = 0
) -> None:
    """The part of `warm_up` that verifies trees, with the same arguments."""
    if not use_triton(device):
        return
    # The kernels are the same for all batches, and for widths up to the same power of two unless 16 divides one.
    kinds = {((nodes - 1).bit_length(), nodes % 16 == 0): nodes for nodes in widths}
    for nodes in kinds.values():
        tree = _roots(1, nodes, device)
        verified = verify(tree, torch.zeros(1, nodes, dtype=torch.int64, device=device))
        if pool is not None:
            pool.compact(torch.full((1, nodes), slot, dtype=torch.int64, device=device), verified)


def _roots(batch: int, nodes: int, device: torch.device) -> TreeBatch:
    """Trees of no draft tokens, as wide as such of `nodes` nodes."""
    none = np.zeros((batch, nodes), np.int32)
    return TreeBatch.from_numpy(none, none - 1, none, np.ones(batch, np.int32), device)
