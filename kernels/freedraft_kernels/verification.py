"""`Verification`: which draft tokens the target accepts, and the bonus token after them.

Both procedures walk the tree from the root. Greedy verification accepts the child that is the target's argmax. Sampling
verification offers the children of a node in turn, each as a one-hot draft (its proposal is deterministic, so q = 1 at
its token): accept with the token's current probability; on rejection set that probability to zero and renormalise. When
nothing is accepted any more, the bonus token is drawn from what remains of the distribution at the node where the walk
stopped. The output then has exactly the target's distribution (SpecInfer, arXiv 2305.09781, multi-step speculative
sampling, with one-hot drafts).

Probabilities are compared as integers of 2**-46: sums of integers do not depend on their order, so every implementation
gives the same tokens, and a token's probability is off by less than 2e-14.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from freedraft_kernels.checks import check_tensor
from freedraft_kernels.dispatch import Backend, use_triton
from freedraft_kernels.draws import WEIGHT_ONE, draws, scale
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
        bonus: int32 [B], the bonus token; -1 for a request without nodes.
    """

    accepted: Tensor
    lengths: Tensor
    tokens: Tensor
    bonus: Tensor


def verify_greedy(tree: TreeBatch, targets: Tensor, *, backend: Backend = "auto") -> Verification:
    """Accept the path whose tokens are the target's argmax at their parents.

    Args:
        targets: int32 or int64 [B, N], the target's argmax after each node. What stands at padding is not used.

    Raises:
        ValueError: a wrong shape, dtype or device.
    """
    check_tensor("targets", targets, tree.tokens.shape, (torch.int32, torch.int64), tree.device)
    if use_triton(tree.device, backend):
        from freedraft_kernels.device.verification import launch_verify_greedy

        return Verification(*launch_verify_greedy(tree, targets))
    current, taken = tree.counts.clamp(max=1) - 1, torch.zeros_like(tree.tokens, dtype=torch.bool)
    want = targets[:, 0]
    valid = tree.valid()
    for node in range(1, tree.max_nodes):
        hit = valid[:, node] & (tree.parents[:, node] == current) & (tree.tokens[:, node] == want)
        current = torch.where(hit, node, current)
        want = torch.where(hit, targets[:, node], want)
        taken[:, node] = hit
    return _outcome(tree, taken, want.to(torch.int32))


def verify_sampled(
    tree: TreeBatch, probs: Tensor, seeds: Tensor, positions: Tensor, *, backend: Backend = "auto"
) -> Verification:
    """Accept draft tokens so that the output has exactly the distribution `probs`.

    A request sampled with temperature 0 is one whose rows are one-hot: it is then verified greedily.

    Args:
        probs: float32 [B, N, V], the target's distribution after each node, fully processed (temperature, top-k, top-p,
            penalties, grammar). Rows at nodes sum to 1 within rounding; anything but a number above 0 counts as 0. What
            stands at padding is not used.
        seeds: int64 [B], one per request, the same at every step.
        positions: int32 or int64 [B], the root's position in its request: `seq_lens` before this step.

    Raises:
        ValueError: a wrong shape, dtype or device.
    """
    _check_probs(tree, probs)
    batch = (tree.batch_size,)
    check_tensor("seeds", seeds, batch, (torch.int64,), tree.device)
    check_tensor("positions", positions, batch, (torch.int32, torch.int64), tree.device)
    if use_triton(tree.device, backend):
        from freedraft_kernels.device.verification import launch_verify_sampled

        return Verification(*launch_verify_sampled(tree, probs, seeds, positions))
    return verify_with_draws(tree, probs, draws(seeds, positions, tree.max_nodes))


def verify_with_draws(tree: TreeBatch, probs: Tensor, draws: Tensor) -> Verification:
    """The specification of `verify_sampled`: its outcome as a function of its random draws.

    Integrating over the draws gives the exact probability of every outcome: a node is accepted for all draws below one
    threshold, and the bonus token is monotone in its draw.

    Args:
        draws: int64 [B, N] in [0, 2**48), independent and uniform: entry i >= 1 decides on node i, entry 0 on the
            bonus token.
    """
    _check_probs(tree, probs)
    check_tensor("draws", draws, tree.tokens.shape, (torch.int64,), tree.device)
    vocab = probs.shape[2]
    valid = tree.valid()
    parents = torch.where(valid, tree.parents, 0).clamp(0, tree.max_nodes - 1).to(torch.int64)
    known = valid & (tree.tokens >= 0) & (tree.tokens < vocab)
    column = torch.where(known, tree.tokens, 0).to(torch.int64)
    rows = torch.arange(tree.batch_size, device=tree.device)
    weight = weight_of(probs[rows[:, None], parents, column]) * known  # [B, N], of each node's token after its parent

    current, taken = tree.counts.clamp(max=1) - 1, torch.zeros_like(valid)
    remaining = torch.full_like(draws[:, 0], WEIGHT_ONE)
    for node in range(1, tree.max_nodes):
        child = valid[:, node] & (tree.parents[:, node] == current)
        hit = child & (scale(draws[:, node], remaining.clamp(min=0)) < weight[:, node])
        remaining = torch.where(hit, WEIGHT_ONE, remaining - torch.where(child, weight[:, node], 0))
        current = torch.where(hit, node, current)
        taken[:, node] = hit

    stop = current.clamp(min=0).to(torch.int64)
    left = weight_of(probs[rows, stop])  # [B, V]
    rejected = known & (tree.parents == current[:, None])
    rejected[:, 0] = False
    kept = left.scatter_add(1, column, torch.where(rejected, -weight, 0))
    # Rounding can reject every token a row has. The chance is that of the rounding: draw from the whole row.
    left = torch.where(kept.sum(1, keepdim=True) > 0, kept, left)
    sums = left.cumsum(1)
    threshold = scale(draws[:, 0], sums[:, -1])
    bonus = torch.searchsorted(sums, threshold[:, None], right=True).squeeze(1)
    bonus = torch.where(sums[:, -1] > 0, bonus, 0)  # a row of zeros, or of NaN: no token is right
    return _outcome(tree, taken, bonus.to(torch.int32))


def weight_of(probs: Tensor) -> Tensor:
    """Probabilities as int64 multiples of 2**-46. Scaling by a power of two is exact; what is below is cut off."""
    return (torch.where(probs > 0, probs, 0.0).clamp(max=1.0) * float(WEIGHT_ONE)).to(torch.int64)


def _outcome(tree: TreeBatch, taken: Tensor, bonus: Tensor) -> Verification:
    """From which nodes were taken (bool [B, N], the root's entry False) and the bonus tokens (int32 [B])."""
    present = tree.counts > 0
    taken[:, 0] = present
    lengths = taken.sum(1, dtype=torch.int32)
    index = torch.arange(tree.max_nodes, dtype=torch.int32, device=tree.device)
    order = torch.where(taken, index, tree.max_nodes).sort(1).values
    accepted = torch.where(order < tree.max_nodes, order, -1)
    drafted = tree.tokens.gather(1, accepted.clamp(min=0).to(torch.int64))
    tokens = torch.where(accepted >= 0, drafted, -1).roll(-1, 1)  # the root's moves to the end, and is overwritten
    last = lengths[:, None] - 1
    bonus = torch.where(present, bonus, -1)
    tokens = torch.where(index < last, tokens, torch.where(index == last, bonus[:, None], -1))
    return Verification(accepted, lengths, tokens, bonus)


def _check_probs(tree: TreeBatch, probs: Tensor) -> None:
    if not isinstance(probs, Tensor) or probs.dim() != 3 or probs.shape[2] < 1:
        got = list(probs.shape) if isinstance(probs, Tensor) else type(probs).__name__
        raise ValueError(f"probs is {got}, expected a tensor [batch, nodes, vocabulary >= 1]")
    check_tensor("probs", probs, (*tree.tokens.shape, probs.shape[2]), (torch.float32,), tree.device)
