"""`newest_tokens`: the new tokens of a decoding step, packed for the host."""

from __future__ import annotations

import torch
from torch import Tensor

from freedraft_kernels.dispatch import Backend, use_triton


def newest_tokens(
    tokens: Tensor, lengths: Tensor, slots: Tensor, gained: Tensor, out: Tensor, drafts: Tensor, *,
    backend: Backend = "auto",
) -> None:  # fmt: skip
    """Gather the newest tokens of B requests in S slots, and fill their drafts with the newest one.

    Args:
        tokens: int32 [S, M], rows contiguous, of each slot; it may be host memory that the device can read.
        lengths: int32 [S], at least 1: tokens of the slot's request.
        slots: int32 or int64 [B]; gained: int32 or int64 [B], new tokens of each request.
        out: int32 [B, K + 3], which may be host memory, too, filled with gained, length, and the newest K + 1 tokens,
            the newest last. A shorter request repeats its first token.
        drafts: int64 [B, K], filled with each request's newest token, since engines embed unused draft tokens, too.
    """
    batch, length = drafts.shape
    assert tokens.dtype == lengths.dtype == out.dtype == torch.int32 and drafts.dtype == torch.int64
    assert lengths.shape == tokens.shape[:1] and slots.shape == gained.shape == (batch,)
    assert out.shape == (batch, length + 3) and out.is_contiguous() and drafts.is_contiguous()
    if use_triton(drafts.device, backend):
        from freedraft_kernels.device.newest_tokens import launch_newest_tokens

        launch_newest_tokens(tokens, lengths, slots, gained, out, drafts)
        return
    rows = slots.long()
    known = lengths[rows].long()
    at = (known[:, None] + torch.arange(-length - 1, 0, device=drafts.device)).clamp(min=0)
    out[:, 0], out[:, 1] = gained, known
    out[:, 2:] = tokens[rows[:, None], at]
    drafts.copy_(out[:, -1:].expand_as(drafts))
