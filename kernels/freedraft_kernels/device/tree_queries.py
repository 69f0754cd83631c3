"""Triton kernel of `freedraft_kernels.tree_queries`."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def tree_queries_kernel(
    node_masks,  # int64 [S, K], rows `stride` apart
    prompts,  # int32 [S]
    slots,  # int64 [B]
    nodes, starts,  # int32 [B + 1]
    seq_lens,  # int32 [B]
    prefixes,  # int32 [T]
    masks,  # int64 [T]
    trees,  # int32 [B]
    positions,  # int64 [T]
    parents,  # int32 [T]
    counts,  # int32 [B]
    stride, NODE_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program b writes the queries of request b: its nodes by their masks, earlier tokens in blocks of BLOCK."""
    request = tl.program_id(0)
    slot = tl.load(slots + request)
    count = tl.load(nodes + request + 1) - tl.load(nodes + request)
    start = tl.load(starts + request)
    end = tl.load(starts + request + 1)
    length = tl.load(seq_lens + request)
    root = length - count
    node = tl.arange(0, NODE_BLOCK)
    draft = (node > 0) & (node < count)
    mine = tl.load(node_masks + slot * stride + node - 1, mask=draft, other=0)
    first = tl.sum(tl.where(node == 1, mine, 0), 0)
    tree = (first != 0) & (root >= tl.load(prompts + slot))
    present = tl.sum(((mine != 0) & draft).to(tl.int32), 0)
    tl.store(trees + request, tree.to(tl.int32))
    tl.store(counts + request, tl.where(tree, 1 + present, count))

    one = tl.full([NODE_BLOCK], 1, tl.int64)
    own = tl.where(node > 0, one << tl.maximum(node - 1, 0).to(tl.int64), 0)
    bit = tl.arange(0, 64)
    found = (mine[:, None] >> bit[None, :].to(tl.int64)) & 1
    depth = tl.sum(found, 1)
    before = ((mine & ~own)[:, None] >> bit[None, :].to(tl.int64)) & 1
    parent = tl.max(before.to(tl.int32) * (bit + 1)[None, :], 1)
    to = end - count + node
    branches = (node > 0) & (node < tl.where(tree, count, 0))
    tl.store(prefixes + to, tl.where(branches, root + 1, root + node + 1), mask=node < count)
    tl.store(masks + to, tl.where(branches, tl.where(mine == 0, own, mine), 0), mask=node < count)
    tl.store(parents + to, tl.where(branches, parent, node - 1), mask=node < count)
    tl.store(positions + to, root + depth, mask=branches)

    others = end - start - count
    for block in range(0, others, BLOCK):
        at = block + tl.arange(0, BLOCK)
        tl.store(prefixes + start + at, length - (end - start) + at + 1, mask=at < others)
        tl.store(masks + start + at, tl.zeros([BLOCK], tl.int64), mask=at < others)
        tl.store(parents + start + at, tl.full([BLOCK], -1, tl.int32), mask=at < others)


def launch_tree_queries(
    trees: Any, slots: Tensor, nodes: Tensor, queries: Any, positions: Tensor, parents: Tensor, counts: Tensor
) -> None:
    stride, block = trees.masks.stride(0), triton.next_power_of_2(trees.masks.shape[1] + 1)
    tree_queries_kernel[(len(slots),)](
        trees.masks, trees.prompts, slots, nodes, queries.starts, queries.seq_lens, queries.prefixes, queries.masks,
        queries.trees, positions, parents, counts, stride, NODE_BLOCK=block, BLOCK=256,
        num_warps=4,
    )  # fmt: skip
