"""Triton kernels of `freedraft_kernels.top_tokens.top_tokens`: one pass over the logits for the maxima of blocks, then
one program per row for the best blocks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_SPAN = 4096  # tokens of a program of the first pass
_NONE = tl.constexpr(-0x7FFFFFFFFFFFFFFF)  # key of no token


@triton.jit
def _keys(values, ids):
    """int64, in the order of the values; ties in descending order of ids."""
    bits = values.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return (ordered << 32) | (0xFFFFFFFF - ids.to(tl.int64))


@triton.jit
def _largest(keys, COUNT: tl.constexpr, COUNT_BLOCK: tl.constexpr):
    """int64 [COUNT_BLOCK], the COUNT largest of int64 [N] keys, which differ, in descending order; then _NONE."""
    places = tl.arange(0, COUNT_BLOCK)
    best = tl.full([COUNT_BLOCK], _NONE, tl.int64)
    for k in range(COUNT):
        largest = tl.max(keys, 0)
        best = tl.where(places == k, largest, best)
        keys = tl.where(keys == largest, _NONE, keys)
    return best


@triton.jit
def block_maxima_kernel(
    logits,  # float [R, V], rows `stride` apart
    maxima,  # out float32 [R, blocks]
    sums,  # out float32 [R, spans, 2]
    vocab, stride, blocks, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (r, s) reads row r's tokens from s * SPAN on: the maxima of its blocks, NaN left out, their maximum, and
    the sum of exponentials relative to it, NaN if there is a NaN or +inf."""
    row = tl.program_id(0).to(tl.int64)
    span = tl.program_id(1)
    block = span * (SPAN // BLOCK) + tl.arange(0, SPAN // BLOCK)
    ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    given = tl.load(logits + row * stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    of_blocks = tl.max(tl.where(given == given, given, float("-inf")) + 0.0, 1)  # -0.0 equals 0.0
    highest = tl.max(of_blocks, 0)
    exponentials = tl.exp(given - tl.where(highest == float("-inf"), 0.0, highest))
    tl.store(maxima + row * blocks + block, of_blocks, mask=block < blocks)
    to = sums + (row * tl.num_programs(1) + span) * 2
    tl.store(to, highest)
    tl.store(to + 1, tl.sum(tl.sum(exponentials, 1), 0))


@triton.jit
def top_tokens_kernel(
    logits,  # float [R, V], rows `stride` apart
    maxima, sums,  # of `block_maxima_kernel`
    tokens,  # out int32 [R, COUNT]
    log_probs,  # out float32 [R, COUNT]
    vocab, stride, blocks, spans,
    COUNT: tl.constexpr, COUNT_BLOCK: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Program r writes the likeliest tokens of row r: they lie in the COUNT blocks with the largest maxima."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, BLOCKS)
    of_blocks = tl.load(maxima + row * blocks + number, mask=number < blocks, other=float("-inf"))
    block = 0xFFFFFFFF - (_largest(_keys(of_blocks, number), COUNT, COUNT_BLOCK) & 0xFFFFFFFF)
    ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    inside = ids < vocab  # no token of no block is
    given = tl.load(logits + row * stride + ids, mask=inside, other=float("-inf")).to(tl.float32)
    keys = _keys(tl.where(given == given, given, float("-inf")) + 0.0, ids)
    keys = tl.reshape(tl.where(inside, keys, _NONE), [COUNT_BLOCK * BLOCK])
    keys = _largest(keys, COUNT, COUNT_BLOCK)
    ordered = (keys >> 32).to(tl.int32)
    value = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)

    span = tl.arange(0, SPANS)
    highest = tl.load(sums + (row * spans + span) * 2, mask=span < spans, other=float("-inf"))
    partial = tl.load(sums + (row * spans + span) * 2 + 1, mask=span < spans, other=0.0)
    most = tl.max(highest, 0)
    most = tl.where(most == float("-inf"), 0.0, most)
    log_prob = value - (most + tl.log(tl.sum(partial * tl.exp(highest - most), 0)))
    finite = tl.abs(log_prob) < float("inf")
    place = tl.arange(0, COUNT_BLOCK)
    token = (0xFFFFFFFF - (keys & 0xFFFFFFFF)).to(tl.int32)
    tl.store(tokens + row * COUNT + place, tl.where(finite, token, -1), mask=place < COUNT)
    tl.store(log_probs + row * COUNT + place, tl.where(finite, log_prob, float("-inf")), mask=place < COUNT)


def launch_top_tokens(logits: torch.Tensor, count: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See `freedraft_kernels.top_tokens.top_tokens`; block: tokens per maximum. Makes no float32 copy of the logits,
    which could take gigabytes."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    (rows, vocab), device = logits.shape, logits.device
    blocks, spans = triton.cdiv(vocab, block), triton.cdiv(vocab, _SPAN)
    maxima = torch.empty(rows, blocks, dtype=torch.float32, device=device)
    sums = torch.empty(rows, spans, 2, dtype=torch.float32, device=device)
    tokens = torch.empty(rows, count, dtype=torch.int32, device=device)
    log_probs = torch.empty(rows, count, dtype=torch.float32, device=device)
    if rows:
        stride, power = logits.stride(0), triton.next_power_of_2
        block_maxima_kernel[(rows, spans)](logits, maxima, sums, vocab, stride, blocks, SPAN=_SPAN, BLOCK=block)
        top_tokens_kernel[(rows,)](
            logits, maxima, sums, tokens, log_probs, vocab, stride, blocks, spans, COUNT=count,
            COUNT_BLOCK=power(count), BLOCK=block, BLOCKS=power(blocks), SPANS=power(spans),
        )  # fmt: skip
    return tokens, log_probs
