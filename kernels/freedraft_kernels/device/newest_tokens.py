"""`newest_tokens`: the new tokens of a decoding step, packed for the host."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def newest_tokens_kernel(
    tokens,  # int32 [S, M], rows `stride` apart
    lengths,  # int32 [S]
    slots, gained, rejected,  # int [B]
    out,  # int32 [B, K + 4]
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
    to = out + row * (length + 4)
    tl.store(to + 3 + i, newest, mask=wanted)
    new = tl.load(gained + row).to(tl.int32)
    tl.store(to, new)
    tl.store(to + 1, tl.maximum(new - 1 + tl.load(rejected + row).to(tl.int32), 0))
    tl.store(to + 2, known)
    last = tl.load(tokens + slot * stride + known - 1).to(tl.int64)
    tl.store(drafts + row * length + i, tl.zeros([BLOCK], tl.int64) + last, mask=i < length)


def newest_tokens(
    tokens: Tensor, lengths: Tensor, slots: Tensor, gained: Tensor, rejected: Tensor, out: Tensor, drafts: Tensor
) -> None:  # fmt: skip
    """Gather the newest tokens of B requests in S slots, and fill their drafts with the newest one.

    Args:
        tokens: int32 [S, M], rows contiguous, of each slot; it may be host memory that the device can read.
        lengths: int32 [S], at least 1: tokens of the slot's request.
        slots: int32 or int64 [B]; gained, rejected: int32 or int64 [B], new tokens of each request, and its draft
            tokens that were verified and not accepted.
        out: int32 [B, K + 4], which may be host memory, too, filled with gained, draft tokens verified, length, and the
            newest K + 1 tokens, the newest last. A shorter request repeats its first token.
        drafts: int64 [B, K], filled with each request's newest token, since engines embed unused draft tokens, too.
    """
    batch, length = drafts.shape
    assert tokens.dtype == lengths.dtype == out.dtype == torch.int32 and drafts.dtype == torch.int64
    assert lengths.shape == tokens.shape[:1] and slots.shape == gained.shape == rejected.shape == (batch,)
    assert out.shape == (batch, length + 4) and out.is_contiguous() and drafts.is_contiguous()
    if batch:
        newest_tokens_kernel[(batch,)](
            tokens, lengths, slots, gained, rejected, out, drafts, tokens.stride(0), length,
            BLOCK=triton.next_power_of_2(length + 1), num_warps=1,
        )  # fmt: skip
