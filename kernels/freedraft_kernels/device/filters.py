"""Triton kernel of `freedraft_kernels.probs.keep_likeliest`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freedraft_kernels.device.verification import weight
from freedraft_kernels.draws import WEIGHT_ONE

_BLOCK = 4096


@triton.jit
def _block(row, at, vocab):
    p = tl.load(row + at, mask=at < vocab, other=0.0)
    return tl.where(p > 0, p, 0.0)


@triton.jit(do_not_specialize=["vocab"])
def keep_likeliest_kernel(
    probs,  # in and out float32 [B, N, V]
    counts,  # int32 [B]
    ranks,  # int64 [B], most tokens
    masses,  # int64 [B], in weights: a token is kept while those before it have less
    shares,  # float32 [B], of the likeliest token's probability
    sums,  # out int64 [B, N], weight of what is kept
    nodes, vocab, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program b * N + i filters the row of node i of request b."""
    row = tl.program_id(0).to(tl.int64)
    request = row // nodes
    if row % nodes < tl.load(counts + request):
        first = probs + row * vocab
        rank = tl.load(ranks + request)
        mass = tl.load(masses + request)
        here = tl.arange(0, BLOCK)
        top = tl.zeros([BLOCK], tl.float32)
        all_weight = tl.zeros([BLOCK], tl.int64)
        for start in range(0, vocab, BLOCK):
            p = _block(first, start + here, vocab)
            top = tl.maximum(top, p)
            all_weight += weight(p)
        # Floats of one sign are in the order of their bits. `high` is the least probability found so far of which the
        # first token is kept, and what is below `low` is not kept.
        largest = tl.max(top, 0)
        high = largest.to(tl.int32, bitcast=True)
        low = (largest * tl.load(shares + request)).to(tl.int32, bitcast=True)
        if (rank >= vocab) & (tl.sum(all_weight, 0) < mass):
            high = low  # as of requests without top-k and top-p: nothing is to be searched
        above = tl.zeros([], tl.int64)  # tokens above `high`
        before = tl.zeros([], tl.int64)  # their weight
        while low < high:
            middle = low + (high - low) // 2
            count = tl.zeros([BLOCK], tl.int64)
            total = tl.zeros([BLOCK], tl.int64)
            for start in range(0, vocab, BLOCK):
                p = _block(first, start + here, vocab)
                larger = p.to(tl.int32, bitcast=True) > middle
                count += larger.to(tl.int64)
                total += tl.where(larger, weight(p), 0)
            counted = tl.sum(count, 0)
            weighed = tl.sum(total, 0)
            if (counted < rank) & (weighed < mass):
                high = middle
                above = counted
                before = weighed
            else:
                low = middle + 1
        # Of equally likely tokens the first ones, as many as there is room for.
        share = weight(high.to(tl.float32, bitcast=True))
        room = rank - above
        if share > 0:
            room = tl.minimum(room, (mass - before + share - 1) // share)
        passed = tl.zeros([], tl.int64)
        kept_weight = tl.zeros([BLOCK], tl.int64)
        for start in range(0, vocab, BLOCK):
            p = _block(first, start + here, vocab)
            bits = p.to(tl.int32, bitcast=True)
            equal = (bits == high).to(tl.int64)
            kept = (bits > high) | ((equal > 0) & (passed + tl.cumsum(equal, 0) <= room))
            passed += tl.sum(equal, 0)
            kept_weight += tl.where(kept, weight(p), 0)
            tl.store(first + start + here, tl.where(kept, p, 0.0), mask=start + here < vocab)
        tl.store(sums + row, tl.sum(kept_weight, 0))


def launch_keep_likeliest(
    probs: torch.Tensor, counts: torch.Tensor, ranks: torch.Tensor, masses: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """Filter `probs` (float32 [B, N, V]) in place; return the weight of what is kept, int64 [B, N]."""
    batch, nodes, vocab = probs.shape
    sums = torch.full((batch, nodes), WEIGHT_ONE, dtype=torch.int64, device=probs.device)
    if sums.numel():
        keep_likeliest_kernel[(batch * nodes,)](
            probs, counts, ranks, masses, shares, sums, nodes, vocab, BLOCK=_BLOCK, num_warps=8
        )
    return sums
