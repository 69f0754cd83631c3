"""`Verification`: which draft tokens the target accepts, and the bonus token after them.

At every node the target has a token: the likeliest one, or one drawn by the engine's sampler. The walk goes from the
root to the child with that token, until there is none: that token is then the bonus. The output is the target's without
drafts, seed by seed if a sampler's noise depends on seed and position only. A child is accepted with the target's
probability of its token, as in rejection sampling with deterministic drafts (SpecInfer, arXiv 2305.09781, with one-hot
drafts).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from freedraft_kernels.dispatch import Backend, use_triton
from freedraft_kernels.tree import TreeBatch


@dataclass(frozen=True, slots=True)
class Verification:
    """The outcome for B requests with trees of at most N nodes.

    Attributes:
        accepted: int32 [B, N], the accepted nodes from the root (node 0) down; -1 beyond.
        lengths: int32 [B], number of accepted nodes, root included, which is also the number of new tokens; 0 for a
            request without nodes.
        tokens: int32 [B, N], the new tokens: those of the accepted nodes without the root, then the bonus token;
            -1 beyond.
    """

    accepted: Tensor
    lengths: Tensor
    tokens: Tensor


def verify_rows(
    tokens: Tensor, targets: Tensor, starts: Tensor, nodes: int, trees: tuple[Tensor, ...] | None = None
) -> tuple[Verification, Tensor]:
    """`verify` by Triton for B requests with R rows in all, each with at most `nodes` (N), of chains unless there are
    trees.

    Args:
        tokens: int32 [R], of each row's node, -1 if it must not be accepted; targets: int32 or int64 [R].
        starts: int32 [B + 1], first row of each request, and R.
        trees: parents, int32 [T], and KV slots, int64 [T], of a step's tokens; each row's token, int [R]; number of
            nodes of each request, int32 [B].

    Returns:
        The outcome, tokens in int64; int64 [B, N], KV slots of trees' nodes, 0 beyond, undefined for chains.
    """
    assert tokens.shape == targets.shape and tokens.is_contiguous() and targets.is_contiguous()
    from freedraft_kernels.device.verification import launch_verify

    inputs = tokens, targets, starts, *(trees or (None,) * 4)
    *parts, slots = launch_verify(inputs, len(starts) - 1, nodes, torch.int64)
    return Verification(*parts), slots


def verify(tree: TreeBatch, targets: Tensor, *, backend: Backend = "auto") -> Verification:
    """Accept the path of tokens that are the target's at their parents.

    Args:
        targets: int32 or int64 [B, N], the target's token after each node, likeliest or drawn; ignored at padding.
    """
    assert targets.shape == tree.tokens.shape and targets.is_contiguous()
    if use_triton(tree.device, backend):
        from freedraft_kernels.device.verification import launch_verify

        inputs = tree.tokens, targets, None, tree.parents, None, None, tree.counts
        return Verification(*launch_verify(inputs, tree.batch_size, tree.max_nodes, torch.int32)[:3])
    valid = tree.valid()
    current, taken = tree.counts.clamp(max=1) - 1, torch.zeros_like(valid)
    taken[:, 0], want = valid[:, 0], targets[:, 0]
    for node in range(1, tree.max_nodes):
        hit = valid[:, node] & (tree.parents[:, node] == current) & (tree.tokens[:, node] == want)
        current = torch.where(hit, node, current)
        want = torch.where(hit, targets[:, node], want)
        taken[:, node] = hit
    lengths = taken.sum(1, dtype=torch.int32)
    index = torch.arange(tree.max_nodes, dtype=torch.int32, device=tree.device)
    order = torch.where(taken, index, tree.max_nodes).sort(1).values
    accepted = torch.where(order < tree.max_nodes, order, -1)
    said = targets.gather(1, accepted.clamp(min=0).to(torch.int64)).to(torch.int32)
    tokens = torch.where(accepted >= 0, said, -1)
    return Verification(accepted, lengths, tokens)
