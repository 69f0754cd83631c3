"""`write_tree_pages`: what FlashAttention reads of a paged KV cache for draft trees, from their masks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from freedraft_kernels.dispatch import Backend, use_triton


class PagedKeys(NamedTuple):
    """The keys of R rows of queries. lengths: int32 [R], their number; ends: int32 [R + 1], 0 and the sums of `lengths`
    up to each row; pages: int32 [R, P], rows contiguous, where they are."""

    lengths: Tensor
    ends: Tensor
    pages: Tensor


def write_tree_pages(
    mask: Tensor, positions: Tensor, seq_lens: Tensor, rows: Tensor, table: Tensor, past: PagedKeys, nodes: PagedKeys,
    *, page_size: int, backend: Backend = "auto",
) -> None:  # fmt: skip
    """Write the cached tokens of B requests, in pages, and what each of their N nodes attends to among the nodes, in
    pages of one token; after these, `pages` names the request's other nodes.

    Args:
        mask, positions: as in `TreeInputs`, full layout. Requests beyond `positions` are padding, whose nodes attend to
            all N.
        seq_lens: int32 or int64 [B], tokens in the KV cache; rows: int32 or int64 [B], rows of `table`.
        table: int32 [S, M], KV slots of each position; those of the nodes follow those of the cached tokens.
        past, nodes: out, of B and B * N rows; `ends[0]` stays as it is, and so do pages of `past` beyond its keys.
    """
    width = nodes.pages.shape[1]
    assert len(nodes.lengths) == width * len(past.lengths) and mask.dtype == torch.bool
    if use_triton(mask.device, backend):
        from freedraft_kernels.device.tree_pages import launch_tree_pages

        launch_tree_pages(mask, positions, seq_lens, rows, table, past, nodes, page_size=page_size)
        return
    start = 0
    for b, (length, row) in enumerate(zip(seq_lens.tolist(), rows.tolist(), strict=True)):
        seen, here = mask.new_ones(width, width), slice(b * width, (b + 1) * width)
        if here.start < len(positions):
            end = start + width * (length + width)
            seen, start = mask[start:end].view(width, -1)[:, length:], end
        seen_first = (~seen).int().argsort(stable=True)
        nodes.lengths[here], nodes.pages[here] = seen.sum(1), table[row, length : length + width][seen_first]
        cached = table[row, :length:page_size] // page_size
        past.lengths[b], past.pages[b, : len(cached)] = length, cached
    for keys in (past, nodes):
        keys.ends[1:] = keys.lengths.cumsum(0)
