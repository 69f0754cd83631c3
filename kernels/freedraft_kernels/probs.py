"""`target_probs`: logits to the distribution that sampling verification must reproduce."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from freedraft_kernels.checks import check_tensor
from freedraft_kernels.dispatch import Backend, use_triton
from freedraft_kernels.draws import WEIGHT_ONE

_NO_LIMIT = 1 << 62


def target_probs(
    logits: Tensor, temperatures: Tensor, *, top_ks: Tensor | None = None, top_ps: Tensor | None = None,
    min_ps: Tensor | None = None, counts: Tensor | None = None, in_turns: bool = False, backend: Backend = "auto",
) -> Tensor:  # fmt: skip
    """float32 [B, N, V]: the distribution each node's next token is sampled from.

    Filters are skipped where they are None: pass only those that some request uses. Ties go to the lower id.

    Args:
        logits: float [B, N, V], penalties and grammar mask already applied.
        temperatures: float [B]; 0 or less is greedy: one-hot at the argmax.
        top_ks: int [B]; at most this many tokens are kept; below 1 is no limit.
        top_ps: float [B]; the smallest set of likeliest tokens whose mass reaches p.
        min_ps: float [B]; tokens of at least this share of the likeliest one's probability.
        counts: int32 [B], nodes of each request; rows beyond are padding, which is not filtered. None: all are nodes.
        in_turns: whether the mass that top-p counts is that of what top-k keeps, or (the default) of all tokens.

    Raises:
        ValueError: a wrong shape.
    """
    if logits.dim() != 3:
        raise ValueError(f"logits has shape {list(logits.shape)}, expected [batch, nodes, vocabulary]")
    options = {"temperatures": temperatures, "top_ks": top_ks, "top_ps": top_ps, "min_ps": min_ps, "counts": counts}
    for name, option in options.items():
        if option is not None and tuple(option.shape) != (logits.shape[0],):
            raise ValueError(f"{name} has shape {list(option.shape)}, expected [{logits.shape[0]}]")
    greedy = (temperatures <= 0)[:, None, None]
    probs = torch.softmax(logits.float() / torch.where(greedy, 1.0, temperatures[:, None, None]), -1)
    if top_ks is not None or top_ps is not None or min_ps is not None:
        nodes = torch.full_like(temperatures, logits.shape[1], dtype=torch.int32) if counts is None else counts
        if in_turns and top_ks is not None:
            probs /= keep_likeliest(probs, nodes, top_ks, None, None, backend=backend)[:, :, None]
            top_ks = None
        probs /= keep_likeliest(probs, nodes, top_ks, top_ps, min_ps, backend=backend)[:, :, None]
    # In place: a second tensor of this size would cost more than all of the rest.
    best = logits.argmax(-1, keepdim=True)
    at_best = torch.where(greedy, 1.0, probs.gather(-1, best))
    return probs.masked_fill_(greedy, 0.0).scatter_(-1, best, at_best)


def keep_likeliest(
    probs: Tensor, counts: Tensor, top_ks: Tensor | None, top_ps: Tensor | None, min_ps: Tensor | None, *,
    backend: Backend = "auto",
) -> Tensor:  # fmt: skip
    """Set the probability of all tokens to 0 that filters take away, in place; arguments as in `target_probs`.

    All filters keep a first part of the tokens in falling order of probability. Masses are sums of the integers that
    verification compares, so that they do not depend on the order of summation. Returns float32 [B, N], the mass of
    what is kept; 1 at padding.
    """
    batch, _, vocab = probs.shape
    check_tensor("probs", probs, probs.shape, (torch.float32,), probs.device)
    check_tensor("counts", counts, (batch,), (torch.int32,), probs.device)
    everything = torch.full((batch,), vocab, dtype=torch.int64, device=probs.device)
    ranks = everything if top_ks is None else torch.where(top_ks < 1, everything, top_ks.to(torch.int64))
    masses = torch.full_like(everything, _NO_LIMIT)
    if top_ps is not None:
        limits = (top_ps.double().clamp(min=0) * WEIGHT_ONE).to(torch.int64).clamp(min=1)
        masses = torch.where(top_ps < 1, limits, masses)
    shares = torch.zeros(batch, device=probs.device) if min_ps is None else min_ps.float().clamp(0, 1)
    if use_triton(probs.device, backend):
        from freedraft_kernels.device.filters import launch_keep_likeliest

        sums = launch_keep_likeliest(probs, counts, ranks, masses, shares)
    else:
        sums = torch.full(probs.shape[:2], WEIGHT_ONE, dtype=torch.int64)
        host = probs.cpu()  # itself where it is there
        given = zip(counts.tolist(), ranks.tolist(), masses.tolist(), shares.cpu().numpy(), strict=True)
        for b, (count, rank, mass, share) in enumerate(given):
            for node in range(count):
                sums[b, node] = _keep_in_row(host[b, node].numpy(), rank, mass, share)
        probs.copy_(host)
        sums = sums.to(probs.device)
    return sums.float() / WEIGHT_ONE


def _keep_in_row(row: NDArray[np.float32], rank: int, mass: int, share: np.float32) -> int:
    """The weight of what is kept of one row; the rest is set to 0. In NumPy: a thread pool costs more than it brings on
    so many small operations."""
    row[~(row > 0)] = 0
    vocab, best = len(row), row.max()
    floor = best * share
    # Only what can be kept is sorted: the `rank` likeliest, and nothing so small that all of its kind together do not
    # make up what is beyond `mass`.
    least = float(floor)
    if rank < vocab:
        least = max(least, float(np.partition(row, vocab - rank)[vocab - rank]))
    beyond = int(_weights(row).sum()) - mass
    if beyond > 0:
        least = max(least, beyond / WEIGHT_ONE / vocab / 2)
    able = np.flatnonzero(row >= min(least, float(best)))
    order = able[np.argsort(-row[able], kind="stable")]
    ranked = row[order]
    weights = _weights(ranked)
    kept = (weights.cumsum() - weights < mass) & (ranked >= floor)
    kept[rank:] = False
    row[:] = 0
    row[order[kept]] = ranked[kept]
    return int(weights[kept].sum())


def _weights(probs: NDArray[np.float32]) -> NDArray[np.int64]:
    return (np.minimum(probs, np.float32(1)) * np.float32(WEIGHT_ONE)).astype(np.int64)
