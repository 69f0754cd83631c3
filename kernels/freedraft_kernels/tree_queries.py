"""`write_tree_queries`: keys, positions and parents of a step's tokens, from requests' trees."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freedraft_kernels.dispatch import Backend, use_triton
from freedraft_kernels.tree_attention import MAX_DRAFT_NODES, TreeQueries


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


def write_tree_queries(
    trees: NodeMasks, slots: Tensor, nodes: Tensor, queries: TreeQueries, positions: Tensor, parents: Tensor,
    counts: Tensor, *, backend: Backend = "auto",
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
    requests, device = len(slots), slots.device
    assert trees.masks.dtype == slots.dtype == torch.int64 and trees.prompts.dtype == nodes.dtype == torch.int32
    assert trees.masks.shape[1] <= MAX_DRAFT_NODES and trees.masks.stride(1) == 1 and nodes.shape == (requests + 1,)
    if use_triton(device, backend):
        from freedraft_kernels.device.tree_queries import launch_tree_queries

        launch_tree_queries(trees, slots, nodes, queries, positions, parents, counts)
        return
    bits = torch.arange(MAX_DRAFT_NODES, device=device)
    for b, slot in enumerate(slots.tolist()):
        first, last = queries.starts[b : b + 2].tolist()
        count, length = int(nodes[b + 1] - nodes[b]), int(queries.seq_lens[b])
        at, root = torch.arange(length - last + first, length, device=device), length - count
        node = at - root
        mine = trees.masks[slot, : count - 1]
        tree = count > 1 and root >= int(trees.prompts[slot]) and bool(mine[0] != 0)
        queries.trees[b] = tree
        counts[b] = 1 + int((mine != 0).sum()) if tree else count
        queries.prefixes[first:last] = at + 1
        queries.masks[first:last] = 0
        parents[first:last] = (node - 1).clamp(min=-1)
        if tree:
            own = torch.ones_like(mine) << bits[: count - 1]
            found = (mine[:, None] >> bits & 1).bool()
            queries.prefixes[last - count + 1 : last] = root + 1
            queries.masks[last - count + 1 : last] = torch.where(mine == 0, own, mine)
            positions[last - count + 1 : last] = root + found.sum(1)
            before = (mine & ~own)[:, None] >> bits & 1
            parents[last - count + 1 : last] = (before * (bits + 1)).amax(1).int()
