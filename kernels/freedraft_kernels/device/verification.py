"""The Triton kernel of `freedraft_kernels.verification`: one program per request walks down its tree in one scan."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from freedraft_kernels.tree import TreeBatch


@triton.jit
def verify_kernel(
    tokens, parents,  # int32 [B, N]
    counts,  # int32 [B]
    targets,  # int32 or int64 [B, N]
    accepted,  # out int32 [B, N]
    lengths,  # out int32 [B]
    new_tokens,  # out int32 [B, N]
    nodes, NODE_BLOCK: tl.constexpr,
):  # fmt: skip
    """Program b verifies request b."""
    request = tl.program_id(0).to(tl.int64)
    first = request * nodes
    count = tl.minimum(tl.load(counts + request), nodes)
    present = count > 0
    step = tl.arange(0, NODE_BLOCK)
    path = tl.where((step == 0) & present, 0, -1)
    output = tl.full([NODE_BLOCK], -1, tl.int32)
    current = tl.where(present, 0, -1)
    length = tl.where(present, 1, 0)
    want = tl.load(targets + first, mask=present, other=-1).to(tl.int32)
    for node in range(1, count):
        token = tl.load(tokens + first + node)
        parent = tl.load(parents + first + node)
        if (parent == current) & (token == want):
            path = tl.where(step == length, node, path)
            output = tl.where(step == length - 1, token, output)
            length += 1
            current = node
            want = tl.load(targets + first + node).to(tl.int32)
    output = tl.where(step == length - 1, want, output)
    tl.store(accepted + first + step, path, mask=step < nodes)
    tl.store(new_tokens + first + step, output, mask=step < nodes)
    tl.store(lengths + request, length)


def launch_verify(tree: TreeBatch, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """accepted, lengths and tokens of a `Verification`."""
    outputs = tuple(torch.empty_like(like) for like in (tree.tokens, tree.counts, tree.tokens))
    if tree.batch_size:
        verify_kernel[(tree.batch_size,)](
            tree.tokens, tree.parents, tree.counts, targets, *outputs, tree.max_nodes,
            NODE_BLOCK=triton.next_power_of_2(tree.max_nodes), num_warps=1,
        )  # fmt: skip
    return outputs
