"""The Triton kernel of `freedraft_kernels.verification`: one program per request walks down its tree."""

from typing import Any

import torch
import triton
import triton.language as tl


# Rows of a part of a batch begin anywhere.
@triton.jit(do_not_specialize_on_alignment=["tokens", "targets", "counts", "places"])
def verify_kernel(
    tokens,  # int32 [B, N], or [R] of rows
    targets,  # int32 or int64, as tokens
    starts,  # int32 [B + 1], of the requests' rows; None: [B, N]
    parents,  # int32 [B, N], or [T] of rows; None: chains
    slots,  # int64 [T], or None
    places,  # int [R], each row's place among T; None: its own
    counts,  # int32 [B]; None: of rows
    accepted,  # out int32 [B, N]
    lengths,  # out int32 [B]
    new_tokens,  # out int32 or int64 [B, N]
    of_nodes,  # out int64 [B, N], each node's slot, 0 beyond
    nodes, NODE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Program b verifies request b."""
    request = tl.program_id(0).to(tl.int64)
    first = request * nodes if starts is None else tl.load(starts + request).to(tl.int64)
    count = tl.load(starts + request + 1) - first.to(tl.int32) if counts is None else tl.load(counts + request)
    step = tl.arange(0, NODE_BLOCK)
    inside = step < tl.minimum(count, nodes)
    token = tl.load(tokens + first + step, mask=inside, other=-1)
    target = tl.load(targets + first + step, mask=inside, other=-1).to(tl.int32)
    place = first + step
    if places is not None:
        place = tl.load(places + place, mask=inside, other=0).to(tl.int64)
    parent = step - 1
    if parents is not None:
        parent = tl.load(parents + place, mask=inside, other=-1)

    out = request * nodes + step
    path = tl.full([NODE_BLOCK], -1, tl.int32)
    output = path
    length = 0
    node = tl.where(count > 0, 0, NODE_BLOCK)
    while node < NODE_BLOCK:
        want = tl.sum(tl.where(step == node, target, 0), 0)
        path = tl.where(step == length, node, path)
        output = tl.where(step == length, want, output)
        length += 1
        hit = inside & (step > node) & (parent == node) & (token == want)
        node = tl.min(tl.where(hit, step, NODE_BLOCK), 0)
    tl.store(accepted + out, path, mask=step < nodes)
    tl.store(new_tokens + out, output, mask=step < nodes)
    tl.store(lengths + request, length)
    if slots is not None:
        tl.store(of_nodes + out, tl.load(slots + place, mask=inside, other=0), mask=step < nodes)


def launch_verify(inputs: tuple[Any, ...], batch: int, nodes: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The kernel's outputs of its inputs; dtype: of new tokens."""
    kinds, device = (torch.int32, dtype, torch.int64), inputs[0].device
    accepted, new_tokens, of_nodes = (torch.empty(batch, nodes, dtype=kind, device=device) for kind in kinds)
    outputs = accepted, torch.empty(batch, dtype=torch.int32, device=device), new_tokens, of_nodes
    if batch:
        verify_kernel[(batch,)](*inputs, *outputs, nodes, NODE_BLOCK=triton.next_power_of_2(nodes), num_warps=1)
    return outputs
