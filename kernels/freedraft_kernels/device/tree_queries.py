"""`write_tree_queries`: keys, positions and parents of a step's tokens, from requests' trees."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from freedraft_kernels.device.tree_attention import MAX_DRAFT_NODES, TreeQueries


@dataclass(frozen=True, slots=True)
class NodeMasks:
    """The trees that requests verify next, by slot. S slots, K <= 64 draft nodes.

    Attributes:
        masks: int64 [S, K], bit j of node i: j is i or an ancestor of i; roots have no bit. 0 for no node, and in the
            first for a request with a chain. Ancestors come first.
        prompts: int32 [S], length of each prompt: draft tokens inside it are not drafts.
    """

    masks: Tensor
    prompts: Tensor


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


def write_tree_queries(
    trees: NodeMasks, slots: Tensor, nodes: Tensor, queries: TreeQueries, positions: Tensor, parents: Tensor,
    counts: Tensor,
) -> None:  # fmt: skip
    """Write prefixes, masks and `trees` of `queries`, positions, parents and counts.

    The last nodes of a request's queries are its root and draft nodes; a node's position is that of its root plus its
    depth. Queries of requests without a tree are causal, and keep their position.

    Args:
        slots: int64 [B], slots of the step's requests.
        nodes: int32 [B + 1], offsets: request b verifies nodes[b + 1] - nodes[b] nodes, root included, at least 1.
        queries: input: `starts` and `seq_lens`; output: the rest.
        positions: int64 [T], in place, those of a chain.
        parents: int32 [T], out: parent of each node, 0 for the root; -1 for roots and earlier tokens.
        counts: int32 [B], out: number of nodes, root included.
    """
    requests = len(slots)
    assert trees.masks.dtype == slots.dtype == torch.int64 and trees.prompts.dtype == nodes.dtype == torch.int32
    assert trees.masks.shape[1] <= MAX_DRAFT_NODES and trees.masks.stride(1) == 1 and nodes.shape == (requests + 1,)
    stride, block = trees.masks.stride(0), triton.next_power_of_2(trees.masks.shape[1] + 1)
    tree_queries_kernel[(requests,)](
        trees.masks, trees.prompts, slots, nodes, queries.starts, queries.seq_lens, queries.prefixes, queries.masks,
        queries.trees, positions, parents, counts, stride, NODE_BLOCK=block, BLOCK=256,
        num_warps=4,
    )  # fmt: skip
