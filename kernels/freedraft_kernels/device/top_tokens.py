"""Triton kernel of `freedraft_kernels.top_tokens.top_tokens`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit
def top_keys_kernel(
    logits,  # float [R, V], rows `stride` apart
    keys,  # int64 [R, blocks, COUNT]
    vocab,
    stride,
    COUNT: tl.constexpr,
    COUNT_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (r, b) writes the largest keys of row r's tokens from b * BLOCK on."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + row * stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf")) + 0.0
    bits = x.to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    key = (ordered << 32) | (0xFFFFFFFF - ids.to(tl.int64))
    places = tl.arange(0, COUNT_BLOCK)
    best = tl.zeros([COUNT_BLOCK], tl.int64)
    for k in range(COUNT):
        largest = tl.max(key, 0)
        best = tl.where(places == k, largest, best)
        key = tl.where(key == largest, -0x7FFFFFFFFFFFFFFF, key)
    out = (row * tl.num_programs(1) + block) * COUNT
    tl.store(keys + out + places, best, mask=places < COUNT)


def launch_top_keys(logits: torch.Tensor, count: int) -> torch.Tensor:
    """int64 [R, K], keys among which are the largest `count` of each row."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, _BLOCK)
    keys = torch.empty(rows, blocks, count, dtype=torch.int64, device=logits.device)
    if rows:
        top_keys_kernel[(rows, blocks)](
            logits, keys, vocab, logits.stride(0), count, triton.next_power_of_2(count), _BLOCK
        )
    return keys.flatten(1)
