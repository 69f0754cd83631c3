"""Triton kernel of `freedraft_kernels.inputs.tree_inputs`."""

import torch
import triton
import triton.language as tl

from freedraft_kernels.tree import TreeBatch

_COLUMNS = 1024  # cells of a row written at a time
_ROW_SPLITS = 64  # programs that share one row of the mask, at most


@triton.jit(do_not_specialize=["size", "filled"])
def tree_inputs_kernel(
    tokens, parents, depths,  # int32 [B, N]
    counts,  # int32 [B]
    seq_lens,  # int32 or int64 [B]
    input_ids, positions,  # int64 [B * N]
    mask,  # uint8 [size]
    nodes, size, filled, BATCH_BLOCK: tl.constexpr, NODE_BLOCK: tl.constexpr, COLUMN_BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (b * N + i, s) writes node i of request b: its row's cells from s * COLUMN_BLOCK on in steps of all s. Of
    those over the cache, whole blocks up to the first `filled`."""
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    request = row // nodes
    node = (row % nodes).to(tl.int32)
    first = request * nodes  # of the request's nodes
    count = tl.minimum(tl.load(counts + request), nodes)
    length = tl.load(seq_lens + request).to(tl.int64)
    inside = node < count

    before = tl.arange(0, BATCH_BLOCK)
    lengths = tl.load(seq_lens + before, mask=before < request, other=0).to(tl.int64)
    start = nodes * (tl.sum(lengths) + first) + node * (length + nodes)
    for column in range(split * COLUMN_BLOCK, tl.minimum(length, filled), tl.num_programs(1) * COLUMN_BLOCK):
        cache = column + tl.arange(0, COLUMN_BLOCK).to(tl.int64)
        tl.store(mask + start + cache, 1, mask=(cache < length) & (start + cache < size))
    start += length

    if split == 0:
        token = tl.load(tokens + row, mask=inside, other=0)
        depth = tl.load(depths + row, mask=inside, other=0)
        tl.store(input_ids + row, token.to(tl.int64))
        tl.store(positions + row, length + depth)

        other = tl.arange(0, NODE_BLOCK)
        seen = (other == node).to(tl.uint8)
        ancestor = node
        for _ in range(depth):
            ancestor = tl.load(parents + first + ancestor)
            seen = tl.where(other == ancestor, 1, seen).to(tl.uint8)
        tl.store(mask + start + other, seen, mask=(other < nodes) & (start + other < size))


def launch_tree_inputs(
    tree: TreeBatch, seq_lens: torch.Tensor, mask: torch.Tensor, *, cached: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    """Fill `mask` in place, see `tree_inputs`; return input_ids and positions (int64 [B * N])."""
    batch, nodes = tree.batch_size, tree.max_nodes
    rows = batch * nodes
    input_ids = torch.empty(rows, dtype=torch.int64, device=tree.device)
    positions = torch.empty_like(input_ids)
    if rows == 0:
        return input_ids, positions
    # Lengths are known on the device only: enough programs for a row of average length.
    splits = min(max(triton.cdiv(mask.numel() // rows, 4 * _COLUMNS), 1), _ROW_SPLITS if cached else 1)
    tree_inputs_kernel[(rows, splits)](
        tree.tokens, tree.parents, tree.depths, tree.counts, seq_lens, input_ids, positions, mask.view(torch.uint8),
        nodes, mask.numel(), 2**31 - 1 if cached else 1, BATCH_BLOCK=triton.next_power_of_2(batch),
        NODE_BLOCK=triton.next_power_of_2(nodes), COLUMN_BLOCK=_COLUMNS, num_warps=4,
    )  # fmt: skip
    return input_ids, positions
