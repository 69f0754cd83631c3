"""SGLang's own Triton attention over draft trees, in Triton's interpreter, against attention written out.

Run with TRITON_INTERPRET=1. Prints "tree" and with a sliding window "chain", on pages of one token and of four, and in
the end "tree" with such a window; each with the largest error.
"""

from __future__ import annotations

import numpy as np
import torch
from freedraft_kernels import tree_inputs
from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

from freedraft.draft import DraftBatch
from tests.support.random_trees import on, path_to, random_batch

HEADS, KV_HEADS, DIM, WINDOW = 4, 2, 16, 6
LENGTHS = [9, 3]


def largest_error(drafts: DraftBatch, window: int, page: int = 1) -> float:
    torch.manual_seed(0)
    batch, nodes = drafts.tokens.shape
    lengths = torch.tensor(LENGTHS)
    inputs = tree_inputs(on("cpu", drafts), lengths, layout="full", seq_lens_sum=sum(LENGTHS), backend="reference")
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
            seen[[*range(length), *(length + node for node in path_to(drafts, b, i))]] = True
            if window > 0:
                seen &= at >= at[length + i] - window
            scores = torch.einsum("hd,shd->hs", q[b * nodes + i], keys[seen]) / DIM**0.5
            want = torch.einsum("hs,shd->hd", scores.softmax(-1), values[seen])
            worst = max(worst, float((out[b * nodes + i] - want).abs().max()))
    return worst


if __name__ == "__main__":
    rng, sizes = np.random.default_rng(0), (len(LENGTHS), 8, 10**6, [8] * len(LENGTHS))
    tree, chain = random_batch(rng, *sizes), random_batch(rng, *sizes, chain=True)
    for page in (1, 4):
        print("tree", largest_error(tree, -1, page))
        print("chain", largest_error(chain, WINDOW, page))
    print("tree", largest_error(tree, WINDOW))
