"""SGLang's own Triton attention over draft trees, in Triton's interpreter, against attention written out.

Run with TRITON_INTERPRET=1. Prints "tree" and with a sliding window "chain", on pages of one token and of four, and in
the end "tree" with such a window; each with the largest error.
"""

from __future__ import annotations

import torch
from freedraft_kernels import TreeBatch, tree_inputs
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

HEADS, KV_HEADS, DIM, WINDOW = 4, 2, 16, 6
LENGTHS = [9, 3]


def trees(parents: list[list[int]]) -> TreeBatch:
    nodes = len(parents[0])
    depths = torch.zeros(len(parents), nodes, dtype=torch.int32)
    for b, row in enumerate(parents):
        for i in range(1, nodes):
            depths[b, i] = depths[b, row[i]] + 1
    counts = torch.full((len(parents),), nodes, dtype=torch.int32)
    return TreeBatch(torch.zeros_like(depths), torch.tensor(parents, dtype=torch.int32), depths, counts)


def largest_error(tree: TreeBatch, window: int, page: int = 1) -> float:
    torch.manual_seed(0)
    batch, nodes = tree.tokens.shape
    lengths = torch.tensor(LENGTHS)
    inputs = tree_inputs(tree, lengths, layout="full", seq_lens_sum=sum(LENGTHS), backend="reference")
    q = torch.randn(batch * nodes, HEADS, DIM)
    k, v = torch.randn(2, batch * nodes, KV_HEADS, DIM)
    pool_k, pool_v = torch.randn(2, 64, KV_HEADS, DIM)
    slots = [torch.randperm(64)[:length] for length in LENGTHS]
    read = [row[-window:] if window > 0 else row for row in slots]
    starts = torch.tensor([0] + [len(row) for row in read]).cumsum(0).to(torch.int32)
    masks = torch.tensor([0] + [nodes * (length + nodes) for length in LENGTHS]).cumsum(0)
    out = torch.zeros_like(q)
    extend_attention_fwd(
        q, k, v, out, pool_k, pool_v,
        torch.arange(0, batch * nodes + 1, nodes, dtype=torch.int32), starts, torch.cat(read),
        inputs.mask, True, masks, nodes, 1.0, 1.0,
        sliding_window_size=window,
        page_size=page,
        window_kv_offsets=torch.tensor([n - len(r) for n, r in zip(LENGTHS, read, strict=True)], dtype=torch.int32),
    )  # fmt: skip
    worst = 0.0
    for b, length in enumerate(LENGTHS):
        here = slice(b * nodes, (b + 1) * nodes)
        keys = torch.cat((pool_k[slots[b]], k[here])).repeat_interleave(HEADS // KV_HEADS, 1)
        values = torch.cat((pool_v[slots[b]], v[here])).repeat_interleave(HEADS // KV_HEADS, 1)
        at = torch.cat((torch.arange(length), inputs.positions[here]))
        for i in range(nodes):
            seen = torch.zeros(length + nodes, dtype=torch.bool)
            seen[:length] = True
            node = i
            while node >= 0:
                seen[length + node] = True
                node = int(tree.parents[b, node])
            if window > 0:
                seen &= at >= at[length + i] - window
            scores = torch.einsum("hd,shd->hs", q[b * nodes + i], keys[seen]) / DIM**0.5
            want = torch.einsum("hs,shd->hd", scores.softmax(-1), values[seen])
            worst = max(worst, float((out[b * nodes + i] - want).abs().max()))
    return worst


if __name__ == "__main__":
    tree = trees([[-1, 0, 0, 1, 1, 3, 2, 0], [-1, 0, 1, 2, 0, 4, 4, 6]])
    chain = trees([list(range(-1, 7))] * 2)
    for page in (1, 4):
        print("tree", largest_error(tree, -1, page))
        print("chain", largest_error(chain, WINDOW, page))
    print("tree", largest_error(tree, WINDOW))
