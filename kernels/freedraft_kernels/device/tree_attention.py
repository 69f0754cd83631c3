"""Attention of draft trees over a paged KV cache: each query reads a prefix of its request, and after it the keys of a
64-bit mask.

A root and its draft nodes are consecutive in a request's KV cache. The prefix of a node ends with its root; bit j of
its mask is draft node j, the j-th key after the root, set for its ancestors and itself. A causal token has a prefix
that ends with itself, and an empty mask.

As in FlashAttention (arXiv 2205.14135) softmax is computed online, and as in Flash-Decoding separate programs read
parts of the keys, and their results are combined by maxima and sums.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

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


@triton.jit(do_not_specialize=["max_queries"])
def tree_attention_kernel(
    query,  # [T, H, D]
    keys, values,  # [P, S, G, D]
    pages,  # int32 [B, M]
    starts,  # int32 [B + 1]
    seq_lens,  # int32 [B]
    prefixes,  # int32 [T]
    masks,  # int64 [T]
    trees,  # int32 [B]
    out,  # [T, H, D]
    parts,  # float32 [B, max_queries, H, SEGMENTS, D], not normalised
    bounds,  # float32 [B, max_queries, H, SEGMENTS, 2], maxima and sums
    scale, max_queries,
    query_stride, query_head_stride, out_stride, out_head_stride,
    page_stride, token_stride, head_stride, values_page_stride, values_token_stride, values_head_stride, pages_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr, PAGE: tl.constexpr,
    SEGMENTS: tl.constexpr, TREES_ONLY: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (i, b, s) reads part s of the keys of request b, for ROWS rows of queries of the query heads of one KV
    head.

    i counts blocks of rows, KV head by KV head, so that blocks of the same keys run together. Row r of a KV head is
    query r // GROUP in its query head r % GROUP.
    """
    request = tl.program_id(1).to(tl.int64)
    blocks = tl.num_programs(0) // (HEADS // GROUP)
    kv_head = tl.program_id(0) // blocks
    block = tl.program_id(0) % blocks
    segment = tl.program_id(2)
    start = tl.load(starts + request)
    count = tl.load(starts + request + 1) - start
    skipped = (count > max_queries) | (block * ROWS >= count * GROUP)
    if TREES_ONLY:
        skipped = skipped | (tl.load(trees + request) == 0)
    if skipped:
        return
    row = block * ROWS + tl.arange(0, ROWS)
    node = row // GROUP
    head = kv_head * GROUP + row % GROUP
    there = node < count
    token = (start + node).to(tl.int64)
    prefix = tl.load(prefixes + token, mask=there, other=1 << 30)
    shortest = tl.min(prefix, 0)
    named = tl.load(masks + token, mask=there, other=0)
    dim = tl.arange(0, SIZE_BLOCK)
    inside = dim < SIZE
    here = there[:, None] & inside[None, :]
    q = tl.load(query + token[:, None] * query_stride + head[:, None] * query_head_stride + dim[None, :], here, 0.0)

    length = tl.load(seq_lens + request)
    tiles = tl.cdiv(length, TILE)
    per_segment = tl.cdiv(tiles, SEGMENTS)
    first = segment * per_segment
    last = tl.minimum(first + per_segment, tiles)
    highest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, SIZE_BLOCK], tl.float32)
    for tile in range(first, last):
        at = tile * TILE + tl.arange(0, TILE)
        known = at < length
        page = tl.load(pages + request * pages_stride + at // PAGE, known, 0).to(tl.int64)
        k_at = page * page_stride + (at % PAGE) * token_stride + kv_head * head_stride
        v_at = page * values_page_stride + (at % PAGE) * values_token_stride + kv_head * values_head_stride
        k = tl.load(keys + k_at[None, :] + dim[:, None], known[None, :] & inside[:, None], 0.0)
        v = tl.load(values + v_at[:, None] + dim[None, :], known[:, None] & inside[None, :], 0.0)
        scores = tl.dot(q, k, input_precision="ieee") * scale  # float32 would be rounded to TF32 otherwise
        if (tile + 1) * TILE > shortest:
            behind = at[None, :] - prefix[:, None]
            bit = (named[:, None] >> tl.minimum(tl.maximum(behind, 0), 63).to(tl.int64)) & 1
            seen = known[None, :] & ((behind < 0) | ((behind < 64) & (bit != 0)))
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)  # no key yet
        weights = tl.exp(scores - base[:, None])
        shrink = tl.exp(highest - base)
        total = total * shrink + tl.sum(weights, 1)
        sums = sums * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
        highest = higher
    if SEGMENTS == 1:
        result = sums / total[:, None]
        to = out + token[:, None] * out_stride + head[:, None] * out_head_stride + dim[None, :]
        tl.store(to, result.to(out.dtype.element_ty), mask=here)
    else:
        part = ((request * max_queries + node) * HEADS + head) * SEGMENTS + segment
        tl.store(parts + part[:, None] * SIZE + dim[None, :], sums, mask=here)
        tl.store(bounds + part * 2, highest, mask=there)
        tl.store(bounds + part * 2 + 1, total, mask=there)


@triton.jit(do_not_specialize=["max_queries"])
def sum_parts_kernel(
    parts,  # float32 [B, max_queries, H, SEGMENTS, D]
    bounds,  # float32 [B, max_queries, H, SEGMENTS, 2]
    starts,  # int32 [B + 1]
    trees,  # int32 [B]
    out,  # [T, H, D]
    max_queries, out_stride, out_head_stride,
    SIZE: tl.constexpr, SIZE_BLOCK: tl.constexpr, SEGMENTS: tl.constexpr, TREES_ONLY: tl.constexpr,
):  # fmt: skip
    """Program (b, i, h) combines the parts of query i of request b in head h."""
    request = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1)
    head = tl.program_id(2)
    start = tl.load(starts + request)
    count = tl.load(starts + request + 1) - start
    skipped = (count > max_queries) | (node >= count)
    if TREES_ONLY:
        skipped = skipped | (tl.load(trees + request) == 0)
    if skipped:
        return
    dim = tl.arange(0, SIZE_BLOCK)
    inside = dim < SIZE
    part = ((request * max_queries + node) * tl.num_programs(2) + head) * SEGMENTS + tl.arange(0, SEGMENTS)
    highest = tl.load(bounds + part * 2)
    share = tl.exp(highest - tl.max(highest, 0))  # the prefix is not empty: one of them is finite
    sums = tl.load(parts + part[:, None] * SIZE + dim[None, :], inside[None, :], 0.0)
    total = tl.sum(share * tl.load(bounds + part * 2 + 1), 0)
    result = tl.sum(sums * share[:, None], 0) / total
    to = out + (start + node).to(tl.int64) * out_stride + head * out_head_stride + dim
    tl.store(to, result.to(out.dtype.element_ty), mask=inside)


def tree_attention(
    query: Tensor, keys: Tensor, values: Tensor, queries: TreeQueries, pages: Tensor, out: Tensor, *, scale: float,
    max_queries: int, max_seq_len: int, trees_only: bool, scratch: Tensor,
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
        scratch: float32, contiguous, at least `scratch_size`, reusable by later calls.
    """
    tokens, heads, size = query.shape
    requests = queries.seq_lens.shape[0]
    assert keys.shape == values.shape and keys.shape[3] == size and heads % keys.shape[2] == 0
    assert out.shape == query.shape and {t.stride(-1) for t in (query, keys, values, out)} == {1}
    assert len(queries.starts) == requests + 1 and len(queries.trees) == requests
    assert min(len(queries.prefixes), len(queries.masks)) >= tokens
    segments = split_keys(requests, heads, keys.shape[2], max_queries, max_seq_len)
    kv_heads = keys.shape[2]
    group, size_block = heads // kv_heads, max(16, triton.next_power_of_2(size))
    row_bytes = size_block * query.element_size()
    needed = max(16, triton.next_power_of_2(max_queries * group))
    narrow = row_bytes <= 256
    wide = narrow and needed >= 64 and (segments > 1 or needed == 64)  # otherwise smaller blocks were faster on an H200
    if query.is_cuda:  # registers spill before Hopper and in float32
        wide &= query.element_size() <= 2 and torch.cuda.get_device_capability(query.device)[0] >= 9
    rows = min(needed, 128 if wide else 64 if row_bytes <= 512 else 16)
    results = requests * max_queries * heads * segments
    assert segments == 1 or scratch.numel() >= results * (size + 2)
    parts, bounds = (out, out) if segments == 1 else (scratch, scratch[results * size :])
    grid = (kv_heads * triton.cdiv(max_queries * group, rows), requests, segments)
    shape = {"SIZE": size, "SIZE_BLOCK": size_block, "SEGMENTS": segments, "TREES_ONLY": trees_only}
    strides = *query.stride()[:2], *out.stride()[:2], *keys.stride()[:3], *values.stride()[:3], pages.stride(0)
    tree_attention_kernel[grid](
        query, keys, values, pages, queries.starts, queries.seq_lens, queries.prefixes, queries.masks, queries.trees,
        out, parts, bounds, scale, max_queries, *strides, HEADS=heads, GROUP=group, PAGE=keys.shape[1], ROWS=rows,
        TILE=64 if wide else 32, num_warps=4, num_stages=2 if narrow else 1, **shape,
    )  # fmt: skip
    if segments > 1:
        sum_parts_kernel[(requests, max_queries, heads)](
            parts, bounds, queries.starts, queries.trees, out, max_queries, *out.stride()[:2],
            num_warps=4 if segments > 16 else 1, **shape,
        )  # fmt: skip
