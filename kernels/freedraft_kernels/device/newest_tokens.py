"""Triton kernel of `freedraft_kernels.newest_tokens.newest_tokens`."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def newest_tokens_kernel(
    tokens,  # int32 [S, M], rows `stride` apart
    lengths,  # int32 [S]
    slots, gained,  # int [B]
    out,  # int32 [B, K + 3]
    drafts,  # int64 [B, K]
    stride, length,  # K
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program b gathers for request b."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row).to(tl.int64)
    known = tl.load(lengths + slot)
    i = tl.arange(0, BLOCK)
    wanted = i <= length
    at = tl.maximum(known - 1 - length + i, 0)
    newest = tl.load(tokens + slot * stride + at, mask=wanted, other=0)
    to = out + row * (length + 3)
    tl.store(to + 2 + i, newest, mask=wanted)
    tl.store(to, tl.load(gained + row).to(tl.int32))
    tl.store(to + 1, known)
    last = tl.load(tokens + slot * stride + known - 1).to(tl.int64)
    tl.store(drafts + row * length + i, tl.zeros([BLOCK], tl.int64) + last, mask=i < length)


def launch_newest_tokens(
    tokens: Tensor, lengths: Tensor, slots: Tensor, gained: Tensor, out: Tensor, drafts: Tensor
) -> None:
    batch, length = drafts.shape
    if batch:
        newest_tokens_kernel[(batch,)](
            tokens, lengths, slots, gained, out, drafts, tokens.stride(0), length,
            BLOCK=triton.next_power_of_2(length + 1), num_warps=1,
        )  # fmt: skip
