"""`warm_up`: compiles kernels before the first step."""

from collections.abc import Sequence

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
    """Run the operations of steps with trees, so that no step waits for a compiler; does nothing without Triton.

    Args:
        widths: numbers of nodes per request that steps have.
        logits: float [1, V], in the target's dtype.
        top: likeliest tokens kept per node.
        pool: pool of compaction; its `slot` may be written.
    """
    device = logits.device
    if not use_triton(device):
        return
    powers = [1 << i for i in range((max_batch - 1).bit_length() + 1)]  # the mask's kernel is specialised for each
    for nodes in widths:
        for batch in powers:
            lengths = torch.zeros(batch, dtype=torch.int64, device=device)
            tree_inputs(_roots(batch, nodes, device), lengths, 0)
    top_tokens(logits, top)
    # The kernels are the same for all batches, and for widths up to the same power of two unless 16 divides one.
    kinds = {((nodes - 1).bit_length(), nodes % 16 == 0): nodes for nodes in widths}
    for nodes in kinds.values():
        tree = _roots(1, nodes, device)
        verified = verify(tree, torch.zeros(1, nodes, dtype=torch.int64, device=device))
        if pool is not None:
            pool.compact(torch.full((1, nodes), slot, dtype=torch.int64, device=device), verified)


def _roots(batch: int, nodes: int, device: torch.device) -> TreeBatch:
    """Trees without draft tokens, of width `nodes`."""
    none = np.zeros((batch, nodes), np.int32)
    return TreeBatch.from_numpy(none, none - 1, none, np.ones(batch, np.int32), device)
