"""`TreeInputs`: the target model's inputs for draft trees: token ids, positions and the tree mask."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from freedraft_kernels.dispatch import Backend, use_triton
from freedraft_kernels.tree import TreeBatch


@dataclass(frozen=True, slots=True)
class TreeInputs:
    """Inputs of one verifying forward pass over B trees of N nodes each.

    Attributes:
        input_ids: int64 [B * N], token of each node; 0 for padding.
        positions: int64 [B * N], `seq_lens[b] + depth` of each node; `seq_lens[b]` for padding.
        mask: bool [size], True where the node of the row may attend to the column: for each request b in turn the rows
            [N, seq_lens[b] + N], over its KV cache and then its nodes, as SGLang's triton and flashinfer backends read
            it. A node sees the whole cache, its ancestors and itself; padding sees the cache and itself, so that no row
            is empty and no softmax is NaN.
    """

    input_ids: Tensor
    positions: Tensor
    mask: Tensor


def tree_inputs(
    tree: TreeBatch, seq_lens: Tensor, seq_lens_sum: int, *, cached: bool = True, backend: Backend = "auto"
) -> TreeInputs:
    """Token ids, positions and tree mask of `tree`.

    Args:
        seq_lens: int32 or int64 [B], tokens of each request in the KV cache (without the root).
        seq_lens_sum: the sum of `seq_lens`, or an upper bound, on the host. The mask is undefined beyond the true sum,
            and truncated by a smaller one.
        cached: whether the cells over the KV cache are read; otherwise all but the first one may be undefined.
    """
    batch, nodes = tree.batch_size, tree.max_nodes
    assert seq_lens.shape == (batch,) and seq_lens.device == tree.device and seq_lens_sum >= 0
    size = nodes * (seq_lens_sum + batch * nodes)
    if use_triton(tree.device, backend):
        from freedraft_kernels.device.inputs import launch_tree_inputs

        mask = torch.empty(size, dtype=torch.bool, device=tree.device)
        return TreeInputs(*launch_tree_inputs(tree, seq_lens, mask, cached=cached), mask)
    valid = tree.valid()
    input_ids = torch.where(valid, tree.tokens, 0).to(torch.int64)
    positions = seq_lens[:, None].to(torch.int64) + torch.where(valid, tree.depths, 0)
    mask = _with_cache(ancestors(tree), seq_lens, size) if nodes > 1 else valid.new_ones(size)
    return TreeInputs(input_ids.view(-1), positions.view(-1), mask)


def ancestors(tree: TreeBatch) -> Tensor:
    """bool [B, N, N]: whether column j is row i itself or an ancestor of it. Padding has only itself."""
    nodes = torch.arange(tree.max_nodes, device=tree.device)
    parents = torch.where(tree.valid(), tree.parents, -1)
    reach = ((nodes == nodes[:, None]) | (nodes == parents[..., None])).float()
    distance = 1
    while distance < tree.max_nodes - 1:  # squaring doubles the distance of ancestors
        reach = (reach @ reach).clamp_(max=1)
        distance *= 2
    return reach > 0


def _with_cache(ancestors: Tensor, seq_lens: Tensor, size: int) -> Tensor:
    """bool [size]: the mask, from its part over the nodes (bool [B, N, N])."""
    pairs = zip(ancestors, seq_lens.tolist(), strict=True)
    rows = [F.pad(own, (length, 0), value=True).flatten() for own, length in pairs]
    mask = torch.cat(rows) if rows else ancestors.new_empty(0)
    return F.pad(mask, (0, size - len(mask)), value=True)  # or cut
