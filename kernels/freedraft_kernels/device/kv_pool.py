"""Triton kernel of `freedraft_kernels.kv_pool.KVPool.compact`."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_WORDS = 256  # 8-byte words copied at a time


def buffer_table(buffers: Sequence[torch.Tensor]) -> torch.Tensor:
    """int64 [buffers, 3] on their device: address, bytes from slot to slot, bytes of a slot."""
    rows = [(b.data_ptr(), b.stride(0) * b.element_size(), b[0].numel() * b.element_size()) for b in buffers]
    return torch.tensor(rows, dtype=torch.int64).to(buffers[0].device)


@triton.jit
def compact_kernel(
    table,  # int64 [buffers, 3], see buffer_table
    slots,  # int32 or int64 [B, N]
    accepted,  # int32 [B, W]
    lengths,  # int32 [B]
    nodes, width, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (b, l, c) moves bytes [c * 8 * BLOCK, (c + 1) * 8 * BLOCK) of request b's rows in buffer l.

    No other program touches these bytes, and this one goes down the path, so overlap is safe (see `KVPool.compact`).
    """
    request = tl.program_id(0).to(tl.int64)
    buffer = tl.program_id(1)
    part = tl.program_id(2)
    address = tl.load(table + buffer * 3)
    stride = tl.load(table + buffer * 3 + 1)
    size = tl.load(table + buffer * 3 + 2)
    length = tl.load(lengths + request)
    # Whole words where everything is a multiple of 8 bytes, single bytes where it is not (odd fp8 rows).
    aligned = ((address | stride | size) & 7) == 0
    for step in range(1, length):
        node = tl.load(accepted + request * width + step)
        if node != step:
            source = address + tl.load(slots + request * nodes + node).to(tl.int64) * stride
            target = address + tl.load(slots + request * nodes + step).to(tl.int64) * stride
            if aligned:
                word = part * BLOCK + tl.arange(0, BLOCK)
                inside = word < size // 8
                row = tl.load(source.to(tl.pointer_type(tl.int64)) + word, mask=inside)
                tl.store(target.to(tl.pointer_type(tl.int64)) + word, row, mask=inside)
            else:
                byte = part * BLOCK * 8 + tl.arange(0, BLOCK * 8)
                within = byte < size
                tail = tl.load(source.to(tl.pointer_type(tl.int8)) + byte, mask=within)
                tl.store(target.to(tl.pointer_type(tl.int8)) + byte, tail, mask=within)


def launch_compact(
    table: torch.Tensor, row_bytes: int, slots: torch.Tensor, accepted: torch.Tensor, lengths: torch.Tensor
) -> None:
    """Compact the buffers of `table`, whose longest row has `row_bytes` bytes, in place."""
    batch, nodes = slots.shape
    block = min(_WORDS, triton.next_power_of_2(triton.cdiv(row_bytes, 8)))
    grid = (batch, table.shape[0], triton.cdiv(row_bytes, 8 * block))
    num_warps = min(4, max(1, block // 64))
    compact_kernel[grid](table, slots, accepted, lengths, nodes, accepted.shape[1], BLOCK=block, num_warps=num_warps)
