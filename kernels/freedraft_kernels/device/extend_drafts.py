"""`extend_drafts`: n-grams behind the drafts of a model's own drafter."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def extend_drafts_kernel(
    drafts, ngrams,  # int64 [S, L]
    slots,  # int [B]
    inputs,  # int32 [T]
    ends, rows,  # int32 [B + 1]
    own, length,  # K, L
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program b extends the draft of request b."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.load(slots + row).to(tl.int64) * length
    i = tl.arange(0, BLOCK)
    ours = tl.load(ngrams + at + i, mask=i < length, other=0)
    given = tl.load(drafts + at + i, mask=i < own, other=0)
    parted = tl.sum(((ours != given) & (i < own)).to(tl.int32), 0)
    end = tl.where(parted == 0, length, own)
    tail = (i >= own) & (i < end)
    tl.store(drafts + at + i, ours, mask=tail)
    verified = tl.load(rows + row + 1) - tl.load(rows + row) - 1
    first = tl.load(ends + row + 1) - verified
    tl.store(inputs + first + i, ours.to(tl.int32), mask=tail & (i < verified))


def extend_drafts(
    drafts: Tensor, ngrams: Tensor, slots: Tensor, inputs: Tensor, ends: Tensor, rows: Tensor, own: int
) -> None:
    """Continue the drafts of B requests in S slots by n-grams that begin with the same K tokens; change no others.

    Args:
        drafts: int64 [S, L], of which the first `own` (K) are drafted; the others become the n-gram's.
        ngrams: int64 [S, L], which may be host memory that the device can read.
        slots: int [B].
        inputs: int32 [T], of the step that verifies drafts: those of request b are the last ones before `ends[b + 1]`.
        ends: int32 [B + 1].
        rows: int32 [B + 1]: `rows[b + 1] - rows[b]` is one more than the draft tokens of request b among the inputs.
    """
    length = drafts.shape[1]
    assert drafts.dtype == ngrams.dtype == torch.int64 and inputs.dtype == ends.dtype == rows.dtype == torch.int32
    assert drafts.is_contiguous() and ngrams.is_contiguous() and drafts.shape == ngrams.shape and own <= length
    if len(slots):
        extend_drafts_kernel[(len(slots),)](
            drafts, ngrams, slots, inputs, ends, rows, own, length, BLOCK=triton.next_power_of_2(length), num_warps=1
        )  # fmt: skip
