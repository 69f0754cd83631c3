"""Triton kernels of `freedraft_kernels.top_tokens.top_tokens`: one pass over the logits, then the best blocks."""

import torch
import triton
import triton.language as tl

_SPAN = 4096  # tokens of a program of the first pass
_NONE = tl.constexpr(-0x7FFFFFFFFFFFFFFF)  # key of no token
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)


@triton.jit
def _largest(values, ids, inside, COUNT: tl.constexpr, COUNT_BLOCK: tl.constexpr):
    """int64 [COUNT_BLOCK], keys of the COUNT largest values, of equals the lower ids; _NONE where there are fewer."""
    bits = (values + 0.0).to(tl.int32, bitcast=True)  # -0.0 equals 0.0
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    keys = tl.where(inside, (ordered << 32) | (0xFFFFFFFF - ids.to(tl.int64)), _NONE)
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
    maxima,  # out float32 [R, blocks], NaN left out
    sums,  # out float32 [R, spans, 2]
    vocab, stride, blocks, SPAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (r, s) reads row r's tokens from s * SPAN on: the maxima of their blocks, their maximum, and the sum of
    exponentials relative to it, NaN if there is a NaN or +inf."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1) * (SPAN // BLOCK) + tl.arange(0, SPAN // BLOCK)
    ids = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    x = tl.load(logits + row * stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    of_blocks = tl.max(tl.where(x == x, x, float("-inf")), 1)
    highest = tl.max(of_blocks, 0)
    exponentials = tl.exp(x - tl.maximum(highest, _LOWEST))
    tl.store(maxima + row * blocks + block, of_blocks, mask=block < blocks)
    to = sums + (row * tl.num_programs(1) + tl.program_id(1)) * 2
    tl.store(to, highest)
    tl.store(to + 1, tl.sum(tl.sum(exponentials, 1), 0))


@triton.jit
def top_tokens_kernel(
    logits,  # float [R, V], rows `stride` apart
    maxima, sums,  # of `block_maxima_kernel`
    tokens, log_probs,  # out int32, float32 [R, COUNT]
    vocab, stride, blocks, spans,
    COUNT: tl.constexpr, COUNT_BLOCK: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, SPANS: tl.constexpr,
):  # fmt: skip
    """Program r writes the likeliest tokens of row r: they lie in the COUNT blocks with the largest maxima."""
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, BLOCKS)
    of_blocks = tl.load(maxima + row * blocks + number, mask=number < blocks, other=float("-inf"))
    block = 0xFFFFFFFF - (_largest(of_blocks, number, number < blocks, COUNT, COUNT_BLOCK) & 0xFFFFFFFF)
    ids = tl.reshape(block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :], [COUNT_BLOCK * BLOCK])
    x = tl.load(logits + row * stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    keys = _largest(tl.where(x == x, x, float("-inf")), ids, ids < vocab, COUNT, COUNT_BLOCK)
    ordered = (keys >> 32).to(tl.int32)
    value = tl.where(ordered < 0, ordered ^ 0x7FFFFFFF, ordered).to(tl.float32, bitcast=True)

    span = tl.arange(0, SPANS)
    highest = tl.load(sums + (row * spans + span) * 2, mask=span < spans, other=float("-inf"))
    partial = tl.load(sums + (row * spans + span) * 2 + 1, mask=span < spans, other=0.0)
    most = tl.maximum(tl.max(highest, 0), _LOWEST)
    log_prob = value - (most + tl.log(tl.sum(partial * tl.exp(highest - most), 0)))
    finite = tl.abs(log_prob) < float("inf")
    place = tl.arange(0, COUNT_BLOCK)
    token = tl.where(finite, 0xFFFFFFFF - (keys & 0xFFFFFFFF), -1)
    tl.store(tokens + row * COUNT + place, token.to(tl.int32), mask=place < COUNT)
    tl.store(log_probs + row * COUNT + place, tl.where(finite, log_prob, float("-inf")), mask=place < COUNT)


def launch_top_tokens(logits: torch.Tensor, count: int, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """See `freedraft_kernels.top_tokens.top_tokens`; block: tokens per maximum. Makes no float32 copy of the logits,
    which could take gigabytes."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    (rows, vocab), power = logits.shape, triton.next_power_of_2
    blocks, spans = triton.cdiv(vocab, block), triton.cdiv(vocab, _SPAN)
    kinds = (blocks, torch.float32), (2 * spans, torch.float32), (count, torch.int32), (count, torch.float32)
    maxima, sums, tokens, log_probs = (torch.empty(rows, n, dtype=kind, device=logits.device) for n, kind in kinds)
    if rows:
        sizes = vocab, logits.stride(0), blocks
        block_maxima_kernel[(rows, spans)](logits, maxima, sums, *sizes, SPAN=_SPAN, BLOCK=block)
        top_tokens_kernel[(rows,)](
            logits, maxima, sums, tokens, log_probs, *sizes, spans, COUNT=count, COUNT_BLOCK=power(count), BLOCK=block,
            BLOCKS=power(blocks), SPANS=power(spans),
        )  # fmt: skip
    return tokens, log_probs
