"""Triton kernel of `freedraft_kernels.top_tokens.top_tokens`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 4096


@triton.jit
def top_keys_kernel(
    logits,  # float [R, V], rows `stride` apart
    keys,  # out int64 [R, blocks, COUNT]
    sums,  # out float32 [R, blocks, 2]
    vocab, stride, COUNT: tl.constexpr, COUNT_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (r, b) writes the largest keys of row r's tokens from b * BLOCK on, their largest logit, and the sum of
    exponentials relative to it: NaN if there is a NaN or +inf."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    given = tl.load(logits + row * stride + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
    x = tl.where(given == given, given, float("-inf")) + 0.0
    highest = tl.max(x, 0)
    exponentials = tl.exp(given - tl.where(highest == float("-inf"), 0.0, highest))
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
    at = (row * tl.num_programs(1) + block) * 2
    tl.store(sums + at, highest)
    tl.store(sums + at + 1, tl.sum(exponentials, 0))


def launch_top_keys(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [R, K], keys that include the largest `count` of each row; float32 [R, 1], logarithms of the sums of
    exponentials. Makes no float32 copy of the logits, which could take gigabytes."""
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    rows, vocab = logits.shape
    blocks = triton.cdiv(vocab, _BLOCK)
    keys = torch.empty(rows, blocks, count, dtype=torch.int64, device=logits.device)
    sums = torch.empty(rows, blocks, 2, dtype=torch.float32, device=logits.device)
    if rows:
        top_keys_kernel[(rows, blocks)](
            logits, keys, sums, vocab, logits.stride(0), count, triton.next_power_of_2(count), _BLOCK
        )
    highest, of_block = sums.unbind(-1)
    return keys.flatten(1), torch.logsumexp(highest + of_block.log(), -1, keepdim=True)
