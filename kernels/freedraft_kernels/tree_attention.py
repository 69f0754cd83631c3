"""Attention of draft trees over a paged KV cache: each query reads a prefix of its request, and after it the keys of a
64-bit mask.

A root and its draft nodes are consecutive in a request's KV cache. The prefix of a node ends with its root; bit j of
its mask is draft node j, the j-th key after the root, set for its ancestors and itself. A causal token has a prefix
that ends with itself, and an empty mask.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from freedraft_kernels.dispatch import Backend, use_triton

MAX_DRAFT_NODES = 64  # per tree: bits of a mask
_SEGMENT = 128  # least keys per program
_MAX_SEGMENTS = 64
_PROGRAMS = 264  # fill a large GPU: two per multiprocessor (132)


@dataclass(frozen=True, slots=True)
class TreeQueries:
    """The queries of a step: T consecutive tokens of B requests.

    Attributes:
        starts: int32 [B + 1], offsets of each request's queries; a request may have none.
        seq_lens: int32 [B], keys of each request, the last ones being its queries'.
        prefixes: int32 [T], number of first keys that each token reads; at least 1.
        masks: int64 [T], further keys that it reads, as bits after the prefix.
        trees: int32 [B], 1 for requests that have trees.
    """

    starts: Tensor
    seq_lens: Tensor
    prefixes: Tensor
    masks: Tensor
    trees: Tensor

    def first(self) -> TreeQueries:
        return replace(self, starts=self.starts[:2], seq_lens=self.seq_lens[:1], trees=self.trees[:1])


def split_keys(requests: int, heads: int, kv_heads: int, max_queries: int, max_seq_len: int) -> int:
    """Number of parallel parts of each request's keys: enough to fill a GPU.

    Args:
        heads, kv_heads: of queries and of keys; max_queries, max_seq_len: the most queries and keys of a request.
    """
    blocks = -(-max_queries * heads // kv_heads // 64)
    segments = 1
    while (
        segments < _MAX_SEGMENTS
        and requests * kv_heads * blocks * segments < _PROGRAMS
        and 2 * segments * _SEGMENT <= max_seq_len
    ):
        segments *= 2
    return segments


def scratch_size(requests: int, heads: int, kv_heads: int, head_size: int, max_queries: int, max_seq_len: int) -> int:
    """Floats of scratch that `tree_attention` needs for steps of at most these requests, queries and keys."""
    most = 0
    for queries in range(1, max_queries + 1):  # fewer queries: more parts
        for n in range(1, requests + 1):
            segments = split_keys(n, heads, kv_heads, queries, max_seq_len)
            if n > 1 and segments == 1:
                break  # the same for all larger numbers
            most = max(most, n * queries * segments)
    return most * heads * (head_size + 2)


def tree_attention(
    query: Tensor, keys: Tensor, values: Tensor, queries: TreeQueries, pages: Tensor, out: Tensor, *, scale: float,
    max_queries: int, max_seq_len: int, trees_only: bool = False, scratch: Tensor | None = None,
    backend: Backend = "auto",
) -> None:  # fmt: skip
    """Write softmax(scale * q k) v into `out`, for requests of at most `max_queries` queries; others are not written.

    Args:
        query: float [T, H, D], H heads of size D, the last dimension contiguous.
        keys, values: float [P, S, G, D], P pages of S tokens and G heads, G a divisor of H, in any strides but for the
            last dimension, which is contiguous; they include the queries' own.
        pages: int32 [B, M], the pages of each request.
        out: as `query`.
        max_seq_len: upper bound of keys per request.
        trees_only: do not write requests without a tree, either.
        scratch: float32, contiguous, at least `scratch_size`, reusable by later calls; None: allocated.
    """
    tokens, heads, size = query.shape
    requests = queries.seq_lens.shape[0]
    assert keys.shape == values.shape and keys.shape[3] == size and heads % keys.shape[2] == 0
    assert out.shape == query.shape and {t.stride(-1) for t in (query, keys, values, out)} == {1}
    assert len(queries.starts) == requests + 1 and len(queries.trees) == requests
    assert min(len(queries.prefixes), len(queries.masks)) >= tokens
    segments = split_keys(requests, heads, keys.shape[2], max_queries, max_seq_len)
    needed = requests * max_queries * heads * segments * (size + 2) if segments > 1 else 0
    assert scratch is None or scratch.numel() >= needed
    if use_triton(query.device, backend):
        from freedraft_kernels.device.tree_attention import launch_tree_attention

        launch_tree_attention(
            query, keys, values, queries, pages, out, scratch, scale, max_queries, segments, trees_only
        )
        return
    starts, lengths = queries.starts.tolist(), queries.seq_lens.tolist()
    for b, length in enumerate(lengths):
        first, last = starts[b], starts[b + 1]
        if not 0 < last - first <= max_queries or (trees_only and not queries.trees[b]):
            continue
        at = torch.arange(length, device=query.device)
        slots = pages[b].long()[at // keys.shape[1]], at % keys.shape[1]
        k, v = (cache[slots].float().repeat_interleave(heads // cache.shape[2], 1) for cache in (keys, values))
        prefix, mask = queries.prefixes[first:last, None].long(), queries.masks[first:last, None]
        behind = at - prefix
        named = (behind < MAX_DRAFT_NODES) & (mask >> behind.clamp(0, MAX_DRAFT_NODES - 1) & 1).bool()
        scores = torch.einsum("qhd,khd->hqk", query[first:last].float(), k) * scale
        probs = scores.masked_fill(~((behind < 0) | named), float("-inf")).softmax(-1)
        out[first:last] = torch.einsum("hqk,khd->qhd", probs, v).to(out.dtype)
