"""`TreeInputs`: what the target model needs to run over draft trees: token ids, positions and the tree mask."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from freedraft_kernels.checks import check_tensor
from freedraft_kernels.dispatch import Backend, use_triton
from freedraft_kernels.tree import TreeBatch

Layout = Literal["full", "query"]


@dataclass(frozen=True, slots=True)
class TreeInputs:
    """Inputs of one verifying forward pass over B trees of N nodes each.

    Attributes:
        input_ids: int64 [B * N], token of each node; 0 for padding.
        positions: int64 [B * N], `seq_lens[b] + depth` of each node; `seq_lens[b]` for padding.
        mask: bool, True where the node of the row may attend to the column.
            layout "query": [B, N, N], over the nodes only.
            layout "full": [size], for each request b in turn the rows [N, seq_lens[b] + N], over its KV cache and then
            its nodes, as SGLang's triton and flashinfer backends read it.
            A node sees the whole cache, its ancestors and itself; padding sees the cache and itself, so that no row is
            empty and no softmax is NaN.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor


def tree_inputs(
    tree: TreeBatch,
    seq_lens: torch.Tensor,
    *,
    layout: Layout,
    seq_lens_sum: int | None = None,
    out: torch.Tensor | None = None,
    backend: Backend = "auto",
) -> TreeInputs:
    """Token ids, positions and tree mask of `tree`.

    Args:
        tree: B trees of at most N nodes.
        seq_lens: int32 or int64 [B], tokens of each request in the KV cache (the root is not among them).
        layout: of the mask, see `TreeInputs`.
        seq_lens_sum: the sum of `seq_lens`, or an upper bound, as the host knows it. The full layout needs it or `out`.
        out: bool, contiguous, to hold the mask: [B, N, N] for the query layout, [any size] for the full one. A full
            mask that does not fit is cut off at the end; what lies beyond a shorter one is left as it was (undefined if
            `seq_lens_sum` was a bound).

    Raises:
        ValueError: a wrong shape, dtype, device or layout, or neither or both of `seq_lens_sum` and `out`.
    """
    batch, nodes = tree.batch_size, tree.max_nodes
    check_tensor("seq_lens", seq_lens, (batch,), (torch.int32, torch.int64), tree.device)
    if layout == "query":
        shape: tuple[int, ...] = (batch, nodes, nodes)
    elif layout == "full":
        if (seq_lens_sum is None) == (out is None):
            raise ValueError("the full layout needs exactly one of seq_lens_sum and out")
        if seq_lens_sum is not None and seq_lens_sum < 0:
            raise ValueError(f"seq_lens_sum is {seq_lens_sum}, expected at least 0")
        shape = (nodes * (seq_lens_sum + batch * nodes),) if seq_lens_sum is not None else (-1,)
    else:
        raise ValueError(f"layout is {layout!r}: use 'full' or 'query'")
    if out is None:
        mask = torch.empty(shape, dtype=torch.bool, device=tree.device)
    else:
        check_tensor("out", out, (out.numel(),) if layout == "full" else shape, (torch.bool,), tree.device)
        mask = out
    if use_triton(tree.device, backend):
        from freedraft_kernels.device.inputs import launch_tree_inputs

        input_ids, positions = launch_tree_inputs(tree, seq_lens, mask, full=layout == "full")
        return TreeInputs(input_ids, positions, mask)
    valid = tree.valid()
    input_ids = torch.where(valid, tree.tokens, 0).to(torch.int64)
    positions = seq_lens[:, None].to(torch.int64) + torch.where(valid, tree.depths, 0)
    query = ancestors(tree)
    if layout == "query":
        mask.copy_(query)
    else:
        _spread(query, seq_lens.to(torch.int64), mask)
    return TreeInputs(input_ids.view(-1), positions.view(-1), mask)


def ancestors(tree: TreeBatch) -> torch.Tensor:
    """bool [B, N, N]: whether column j is row i itself or an ancestor of it. Padding has only itself."""
    nodes = torch.arange(tree.max_nodes, device=tree.device)
    parents = torch.where(tree.valid(), tree.parents, -1)
    reach = ((nodes == nodes[:, None]) | (nodes == parents[..., None])).float()
    distance = 1
    while distance < tree.max_nodes - 1:  # squaring doubles the distance at which ancestors are seen
        reach = (reach @ reach).clamp_(max=1)
        distance *= 2
    return reach > 0


def _spread(query: torch.Tensor, seq_lens: torch.Tensor, out: torch.Tensor) -> None:
    """Write the full layout of `query` (bool [B, N, N]) into `out` (bool [size])."""
    batch, nodes, _ = query.shape
    if batch == 0 or out.numel() == 0:
        return
    ends = torch.cumsum((seq_lens + nodes).repeat_interleave(nodes, output_size=batch * nodes), 0)
    cell = torch.arange(out.numel(), device=out.device)
    row = torch.searchsorted(ends, cell, right=True)
    inside = row < batch * nodes
    row.clamp_(max=batch * nodes - 1)
    request = row // nodes
    length = seq_lens[request]
    column = cell - (ends[row] - length - nodes)  # within the row: the cache first, then the nodes
    node = (column - length).clamp_(0, nodes - 1)
    seen = (column < length) | query.view(batch * nodes, nodes)[row, node]
    out.copy_(torch.where(inside, seen, out))
