"""`write_tree_pages`: what FlashAttention reads of a paged KV cache for draft trees, from their masks."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


class PagedKeys(NamedTuple):
    """The keys of R rows of queries. lengths: int32 [R], their number; ends: int32 [R + 1], 0 and the sums of `lengths`
    up to each row; pages: int32 [R, P], rows contiguous, where they are."""

    lengths: Tensor
    ends: Tensor
    pages: Tensor


@triton.jit(do_not_specialize=["total", "nodes", "page", "stride", "past_stride"])
def tree_pages_kernel(
    mask,  # uint8, full layout
    positions,  # int64 [total]
    seq_lens, rows,  # int32 or int64 [B]
    table,  # int32 [S, stride]
    past_lengths, past_ends, past_pages,  # int32 [B], [B + 1], [B, past_stride]
    lengths, ends, pages,  # int32 [B * N], [B * N + 1], [B * N, N]
    total, nodes, page, stride, past_stride, NODE_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program b * N + i writes node i of request b, and every Nth block of the request's pages."""
    row = tl.program_id(0)
    request, node = row // nodes, row % nodes
    length = tl.load(seq_lens + request).to(tl.int64)
    cached, attended = length * 0, length * 0  # by requests before this one; by nodes before this one
    for first in range(0, row, BLOCK):
        other = first + tl.arange(0, BLOCK)
        before, real = other < row, other < tl.minimum(row, total)
        past = tl.load(seq_lens + other // nodes, mask=before, other=0).to(tl.int64)
        depth = tl.load(positions + other, mask=real, other=0) - past
        attended += tl.sum(tl.where(real, depth + 1, tl.where(before, nodes, 0)))
        cached += tl.sum(tl.where((other % nodes == 0) & (other // nodes < request), past, 0))

    column = tl.arange(0, NODE_BLOCK)
    inside = column < nodes
    start = nodes * (cached + request * nodes) + node * (length + nodes) + length
    seen = tl.load(mask + start + column, mask=column < tl.where(row < total, nodes, 0), other=1)
    seen = tl.where(inside, seen, 0).to(tl.int32)
    count, rank = tl.sum(seen), tl.cumsum(seen, 0)
    slots = table + tl.load(rows + request).to(tl.int64) * stride
    place = tl.where(seen != 0, rank - 1, count + column - rank)
    tl.store(pages + row * nodes + place, tl.load(slots + length + column, mask=inside), mask=inside)
    tl.store(lengths + row, count)
    tl.store(ends + row + 1, attended + count)

    for first in range(node * BLOCK, tl.cdiv(length, page), nodes * BLOCK):
        which = first + tl.arange(0, BLOCK)
        there = which < tl.cdiv(length, page)
        slot = tl.load(slots + which.to(tl.int64) * page, mask=there)
        tl.store(past_pages + request.to(tl.int64) * past_stride + which, slot // page, mask=there)
    if node == 0:
        tl.store(past_lengths + request, length)
        tl.store(past_ends + request + 1, cached + length)


def write_tree_pages(
    mask: Tensor, positions: Tensor, seq_lens: Tensor, rows: Tensor, table: Tensor, past: PagedKeys, nodes: PagedKeys,
    *, page_size: int,
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
    tree_pages_kernel[(len(nodes.lengths),)](
        mask.view(torch.uint8), positions, seq_lens, rows, table, *past, *nodes, len(positions), width, page_size,
        table.stride(0), past.pages.stride(0), NODE_BLOCK=triton.next_power_of_2(width), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
