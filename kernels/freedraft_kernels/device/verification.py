"""Triton kernels of `freedraft_kernels.verification`.

The walk down the tree is one forward scan over the nodes by one program per request. Sampling then sums the weights of
the row where the walk stopped in chunks (many programs per request: a row has up to 152k tokens), and draws the bonus
token in two levels: the chunk first, then the token inside it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from freedraft_kernels.device.draws import draw, scale
from freedraft_kernels.draws import WEIGHT_ONE
from freedraft_kernels.tree import TreeBatch

_ONE = tl.constexpr(WEIGHT_ONE)
_VOCAB_BLOCK = 1024
_MAX_CHUNKS = 64

Outputs = tuple[Tensor, ...]


@triton.jit
def weight(probs):
    """float32 probabilities as int64 multiples of 2**-46; anything but a number above 0 counts as 0."""
    return (tl.minimum(tl.where(probs > 0, probs, 0.0), 1.0) * _ONE).to(tl.int64)


@triton.jit
def verify_greedy_kernel(
    tokens, parents,  # int32 [B, N]
    counts,  # int32 [B]
    targets,  # int32 or int64 [B, N]
    accepted,  # out int32 [B, N]
    lengths,  # out int32 [B]
    new_tokens,  # out int32 [B, N]
    bonus,  # out int32 [B]
    nodes, NODE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Program b verifies request b."""
    request = tl.program_id(0).to(tl.int64)
    first = request * nodes
    count = tl.minimum(tl.load(counts + request), nodes)
    present = count > 0
    step = tl.arange(0, NODE_BLOCK)
    path = tl.where((step == 0) & present, 0, -1)
    output = tl.full([NODE_BLOCK], -1, tl.int32)
    current = tl.where(present, 0, -1)
    length = tl.where(present, 1, 0)
    want = tl.load(targets + first, mask=present, other=-1).to(tl.int32)
    for node in range(1, count):
        token = tl.load(tokens + first + node)
        parent = tl.load(parents + first + node)
        if (parent == current) & (token == want):
            path = tl.where(step == length, node, path)
            output = tl.where(step == length - 1, token, output)
            length += 1
            current = node
            want = tl.load(targets + first + node).to(tl.int32)
    output = tl.where(step == length - 1, want, output)
    tl.store(accepted + first + step, path, mask=step < nodes)
    tl.store(new_tokens + first + step, output, mask=step < nodes)
    tl.store(lengths + request, length)
    tl.store(bonus + request, want)


@triton.jit(do_not_specialize=["vocab"])
def verify_sampled_kernel(
    tokens, parents,  # int32 [B, N]
    counts,  # int32 [B]
    probs,  # float32 [B, N, V]
    seeds,  # int64 [B]
    positions,  # int32 or int64 [B]
    accepted,  # out int32 [B, N]
    lengths,  # out int32 [B]
    new_tokens,  # out int32 [B, N], without the bonus token
    stops,  # out int32 [B], the last accepted node, -1 for a request without nodes
    nodes, vocab, NODE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Program b walks request b's tree."""
    request = tl.program_id(0).to(tl.int64)
    first = request * nodes
    count = tl.minimum(tl.load(counts + request), nodes)
    present = count > 0
    seed = tl.load(seeds + request)
    position = tl.load(positions + request)
    step = tl.arange(0, NODE_BLOCK)
    path = tl.where((step == 0) & present, 0, -1)
    output = tl.full([NODE_BLOCK], -1, tl.int32)
    current = tl.where(present, 0, -1)
    length = tl.where(present, 1, 0)
    one = tl.full([], _ONE, tl.int64)
    remaining = one
    for node in range(1, count):
        parent = tl.load(parents + first + node)
        if parent == current:
            token = tl.load(tokens + first + node)
            known = (token >= 0) & (token < vocab)
            p = tl.load(probs + (first + parent) * vocab + token, mask=known, other=0.0)
            share = weight(p)
            if scale(draw(seed, position, node), tl.maximum(remaining, 0)) < share:
                path = tl.where(step == length, node, path)
                output = tl.where(step == length - 1, token, output)
                length += 1
                current = node
                remaining = one
            else:
                remaining -= share
    tl.store(accepted + first + step, path, mask=step < nodes)
    tl.store(new_tokens + first + step, output, mask=step < nodes)
    tl.store(lengths + request, length)
    tl.store(stops + request, current)


@triton.jit(do_not_specialize=["vocab"])
def chunk_sums_kernel(
    probs,  # float32 [B, N, V]
    stops,  # int32 [B]
    sums,  # out int64 [B, C]
    nodes, vocab, CHUNK: tl.constexpr, VOCAB_BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (b, c) sums the weights of tokens [c * CHUNK, (c + 1) * CHUNK) in the row where walk b stopped."""
    request = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    stop = tl.load(stops + request)
    total = tl.zeros([VOCAB_BLOCK], tl.int64)
    if stop >= 0:
        row = probs + (request * nodes + stop) * vocab
        for start in range(chunk * CHUNK, (chunk + 1) * CHUNK, VOCAB_BLOCK):
            token = start + tl.arange(0, VOCAB_BLOCK)
            total += weight(tl.load(row + token, mask=token < vocab, other=0.0))
    tl.store(sums + request * tl.num_programs(1) + chunk, tl.sum(total))


@triton.jit(do_not_specialize=["vocab", "chunks"])
def bonus_kernel(
    tokens, parents,  # int32 [B, N]
    counts,  # int32 [B]
    probs,  # float32 [B, N, V]
    seeds,  # int64 [B]
    positions,  # int32 or int64 [B]
    stops,  # int32 [B]
    sums,  # int64 [B, C]
    lengths,  # int32 [B]
    new_tokens,  # in and out int32 [B, N]
    bonus,  # out int32 [B]
    nodes, vocab, chunks,
    CHUNK: tl.constexpr, VOCAB_BLOCK: tl.constexpr, NODE_BLOCK: tl.constexpr, CHUNK_BLOCK: tl.constexpr,
):  # fmt: skip
    """Program b draws request b's bonus token from the row where the walk stopped, the rejected tokens left out."""
    request = tl.program_id(0).to(tl.int64)
    first = request * nodes
    count = tl.minimum(tl.load(counts + request), nodes)
    stop = tl.load(stops + request)
    if stop < 0:
        tl.store(bonus + request, -1)
    else:
        row = probs + (first + stop) * vocab
        node = tl.arange(0, NODE_BLOCK)
        inside = (node > 0) & (node < count)
        rejected = inside & (tl.load(parents + first + node, mask=inside, other=-1) == stop)
        token = tl.load(tokens + first + node, mask=inside, other=-1)
        rejected &= (token >= 0) & (token < vocab)
        share = weight(tl.load(row + token, mask=rejected, other=0.0))

        chunk = tl.arange(0, CHUNK_BLOCK)
        whole = tl.load(sums + request * chunks + chunk, mask=chunk < chunks, other=0)
        mine = (token[None, :] // CHUNK == chunk[:, None]) & rejected[None, :]
        kept = whole - tl.sum(tl.where(mine, share[None, :], 0), 1)
        restrict = tl.sum(kept) > 0  # else rounding rejected all there is: draw from the whole row
        kept = tl.where(restrict, kept, whole)

        ends = tl.cumsum(kept, 0)
        position = tl.load(positions + request)
        zero = tl.zeros([], tl.int32)
        threshold = scale(draw(tl.load(seeds + request), position, zero), tl.sum(kept))
        here = tl.sum((ends <= threshold).to(tl.int32))
        passed = tl.sum(tl.where(ends <= threshold, kept, 0))

        choice = tl.zeros([], tl.int32)
        for offset in range(0, CHUNK, VOCAB_BLOCK):
            candidate = here * CHUNK + offset + tl.arange(0, VOCAB_BLOCK)
            left = weight(tl.load(row + candidate, mask=candidate < vocab, other=0.0))
            for i in range(1, count):
                parent = tl.load(parents + first + i)
                if (parent == stop) & restrict:
                    left = tl.where(candidate == tl.load(tokens + first + i), 0, left)
            until = passed + tl.cumsum(left, 0)
            after = passed + tl.sum(left)
            if (passed <= threshold) & (threshold < after):
                choice = here * CHUNK + offset + tl.sum((until <= threshold).to(tl.int32))
            passed = after
        tl.store(bonus + request, choice)
        tl.store(new_tokens + first + tl.load(lengths + request) - 1, choice)


def launch_verify_greedy(tree: TreeBatch, targets: Tensor) -> Outputs:
    """accepted, lengths, tokens and bonus of a `Verification`."""
    accepted, lengths, new_tokens, bonus = outputs = _outputs(tree)
    if tree.batch_size:
        verify_greedy_kernel[(tree.batch_size,)](
            tree.tokens, tree.parents, tree.counts, targets, accepted, lengths, new_tokens, bonus, tree.max_nodes,
            NODE_BLOCK=triton.next_power_of_2(tree.max_nodes), num_warps=1,
        )  # fmt: skip
    return outputs


def launch_verify_sampled(tree: TreeBatch, probs: Tensor, seeds: Tensor, positions: Tensor) -> Outputs:
    """accepted, lengths, tokens and bonus of a `Verification`."""
    accepted, lengths, new_tokens, bonus = outputs = _outputs(tree)
    batch, nodes, vocab = probs.shape
    if batch == 0:
        return outputs
    # A power of two, so that the kernels are compiled for few sizes.
    chunk = max(_VOCAB_BLOCK, triton.next_power_of_2(triton.cdiv(vocab, _MAX_CHUNKS)))
    chunks = triton.cdiv(vocab, chunk)
    stops = torch.empty_like(lengths)
    sums = torch.empty(batch, chunks, dtype=torch.int64, device=tree.device)
    given = (tree.tokens, tree.parents, tree.counts, probs, seeds, positions)
    node_block = triton.next_power_of_2(nodes)
    verify_sampled_kernel[(batch,)](
        *given, accepted, lengths, new_tokens, stops, nodes, vocab, NODE_BLOCK=node_block, num_warps=1
    )
    chunk_sums_kernel[(batch, chunks)](
        probs, stops, sums, nodes, vocab, CHUNK=chunk, VOCAB_BLOCK=_VOCAB_BLOCK, num_warps=4
    )
    bonus_kernel[(batch,)](
        *given, stops, sums, lengths, new_tokens, bonus, nodes, vocab, chunks, CHUNK=chunk, VOCAB_BLOCK=_VOCAB_BLOCK,
        NODE_BLOCK=node_block, CHUNK_BLOCK=triton.next_power_of_2(chunks), num_warps=4,
    )  # fmt: skip
    return outputs


def _outputs(tree: TreeBatch) -> Outputs:
    """int32 [B, N], [B], [B, N], [B], not initialised."""
    return tuple(torch.empty_like(like) for like in (tree.tokens, tree.counts, tree.tokens, tree.counts))
