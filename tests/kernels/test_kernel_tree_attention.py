"""Attention of draft trees, and what tokens of a step read, against plain Python over random trees and contexts."""

from typing import NamedTuple

import numpy as np
import torch
from freedraft_kernels.device.tree_attention import TreeQueries, scratch_size, split_keys, tree_attention
from freedraft_kernels.device.tree_queries import NodeMasks, write_tree_queries
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import DEVICE, EXAMPLES, GPU, runs_triton

from freedraft.draft import DraftBatch
from tests.support.random_trees import path_to, random_batch


class Case(NamedTuple):
    """B requests of a step, of which some have trees, some chains, some prompts.

    `sees[t]`: bool [seq_len], what token t reads; `stands[t]`: its position; `follows[t]`: as `parents`.
    """

    masks: NodeMasks
    slots: torch.Tensor
    nodes: torch.Tensor
    starts: torch.Tensor
    seq_lens: torch.Tensor
    counts: list[int]
    trees: list[int]
    sees: list[np.ndarray]
    stands: list[int]
    follows: list[int]


def random_case(seed: int, width: int = 64, requests: int = 5) -> Case:
    rng = np.random.default_rng(seed)
    requests = int(rng.integers(1, requests + 1))
    slots = rng.permutation(requests + 3)[:requests]
    masks = rng.integers(-(2**62), 2**62, (requests + 3, width))  # of requests that are gone
    prompts = rng.integers(1, 60, requests + 3).astype(np.int32)
    starts, nodes, lengths, counts, trees = [0], [0], [], [], []
    sees: list[np.ndarray] = []
    stands: list[int] = []
    follows: list[int] = []
    for slot in slots.tolist():
        kind = rng.choice(["tree", "chain", "prompt", "end of a prompt"])
        verified = 1 if kind == "prompt" else int(rng.integers(1, width + 2))
        queries = int(rng.integers(1, 50)) if kind == "prompt" else verified
        context = int(rng.integers(0, prompts[slot])) if "prompt" in kind else int(prompts[slot] + rng.integers(0, 90))
        count = verified
        if kind == "tree":
            count = int(rng.integers(1, verified + 1))
            draft = random_batch(rng, 1, width + 1, 10**6, [count])
            masks[slot] = node_masks(draft)
        elif kind == "chain":
            masks[slot] = 0
        is_tree = kind == "tree" and count > 1
        length = context + queries
        for i in range(queries):
            seen = np.arange(length) <= context + i
            node = i - (queries - verified)
            depth, parent = node, max(node - 1, -1)
            if is_tree and node > 0:
                seen[context + 1 :] = False
                if node < count:
                    path = path_to(draft, 0, node)
                    seen[[context + j for j in path]] = True
                    depth, parent = int(draft.depths[0, node]), path[-2]
                else:
                    seen[context + i], depth, parent = True, 0, 0
            sees.append(seen)
            stands.append(context + (queries - verified) + depth)
            follows.append(parent)
        starts.append(starts[-1] + queries)
        nodes.append(nodes[-1] + verified)
        lengths.append(length)
        counts.append(count if is_tree else verified)
        trees.append(int(is_tree))
    known = NodeMasks(torch.from_numpy(masks), torch.from_numpy(prompts)), torch.from_numpy(slots.astype(np.int64))
    given = (torch.tensor(values, dtype=torch.int32) for values in (nodes, starts, lengths))
    return Case(*known, *given, counts, trees, sees, stands, follows)


def node_masks(draft: DraftBatch) -> np.ndarray:
    """int64 [K], of a batch of one tree."""
    masks = np.zeros(draft.max_nodes, np.uint64)
    for node in range(1, int(draft.counts[0])):
        masks[node] = masks[draft.parents[0, node]] | np.uint64(1 << (node - 1))
    return masks[1:].view(np.int64)


def queries_of(case: Case) -> tuple[TreeQueries, list[torch.Tensor]]:
    """What `write_tree_queries` makes of it; positions, parents and counts."""
    tokens, requests = len(case.sees), len(case.slots)
    at = [int(case.seq_lens[b]) - int(case.starts[b + 1]) + t for b in range(requests) for t in tokens_of(case, b)]

    def empty(size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full((size,), 7, dtype=dtype, device=DEVICE)

    made = empty(tokens + 3), empty(tokens + 3, torch.int64), empty(requests)
    queries = TreeQueries(case.starts.to(DEVICE), case.seq_lens.to(DEVICE), *made)
    rest = [torch.tensor(at, dtype=torch.int64, device=DEVICE), empty(tokens), empty(requests)]
    trees = NodeMasks(case.masks.masks.to(DEVICE), case.masks.prompts.to(DEVICE))
    write_tree_queries(trees, case.slots.to(DEVICE), case.nodes.to(DEVICE), queries, *rest)
    return queries, rest


def tokens_of(case: Case, request: int) -> range:
    return range(int(case.starts[request]), int(case.starts[request + 1]))


@runs_triton
@settings(max_examples=EXAMPLES, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 7, 16, 64]))
def test_what_tokens_read_by_triton(seed: int, width: int) -> None:
    case = random_case(seed, width)
    queries, (positions, parents, counts) = queries_of(case)
    assert counts.tolist() == case.counts and queries.trees.tolist() == case.trees
    assert positions.tolist() == case.stands and parents.tolist() == case.follows
    for token, seen in enumerate(case.sees):
        prefix, mask = int(queries.prefixes[token]), int(queries.masks[token])
        behind = np.arange(len(seen)) - prefix
        named = np.array([0 <= d < 64 and mask >> d & 1 == 1 for d in behind.tolist()])
        assert np.array_equal((behind < 0) | named, seen), token
    assert queries.prefixes[len(case.sees) :].tolist() == [7] * 3, "nothing is written beyond the step"


class Cache(NamedTuple):
    """Keys and values of a case in pages in random order, and everything before the attention."""

    query: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    pages: torch.Tensor
    lines: list[torch.Tensor]  # int64 [seq_len], where each request's keys are


def random_cache(case: Case, heads: int, kv_heads: int, size: int, page: int, dtype: torch.dtype, seed: int) -> Cache:
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    needed = [-(-int(length) // page) for length in case.seq_lens]
    order = rng.permutation(sum(needed) + 2).astype(np.int32)
    pages = torch.zeros(len(needed), max(needed) + 1, dtype=torch.int32)
    for b, count in enumerate(needed):
        pages[b, :count] = torch.from_numpy(order[sum(needed[:b]) :][:count])
    # As vLLM keeps them: K and V of a head behind each other, heads of a token, tokens of a page.
    both = torch.randn(len(order), page, kv_heads, 2 * size, generator=generator).to(dtype)
    query = torch.randn(len(case.sees), heads, size, generator=generator).to(dtype)
    lines = []
    for b, length in enumerate(case.seq_lens.tolist()):
        at = torch.arange(length)
        lines.append(pages[b].long()[at // page] * page + at % page)
    return Cache(query, both[..., :size], both[..., size:], pages, lines)


def attended(case: Case, cache: Cache, max_queries: int, trees_only: bool = False) -> dict[int, torch.Tensor]:
    """Of each token that is to be attended to: float64 [H, D]."""
    found = {}
    group = cache.query.shape[1] // cache.keys.shape[2]
    for b, line in enumerate(cache.lines):
        if len(tokens_of(case, b)) > max_queries or (trees_only and not case.trees[b]):
            continue
        k, v = (t.flatten(0, 1)[line].double().repeat_interleave(group, 1) for t in (cache.keys, cache.values))
        for token in tokens_of(case, b):
            seen = torch.from_numpy(case.sees[token])
            scores = torch.einsum("hd,khd->hk", cache.query[token].double(), k[seen]) * 0.2
            found[token] = torch.einsum("hk,khd->hd", scores.softmax(-1), v[seen])
    return found


def check(case: Case, cache: Cache, trees_only: bool = False) -> None:
    queries, _ = queries_of(case)
    out = torch.full_like(cache.query, 7).to(DEVICE)
    width = case.masks.masks.shape[1] + 1
    query, keys, values, pages = (t.to(DEVICE) for t in cache[:4])
    longest, shape = int(case.seq_lens.max()), (query.shape[1], keys.shape[2], query.shape[2])
    scratch = torch.empty(scratch_size(len(case.seq_lens), *shape, width, longest), device=DEVICE)
    how = {"scale": 0.2, "max_queries": width, "max_seq_len": longest, "trees_only": trees_only, "scratch": scratch}
    tree_attention(query, keys, values, queries, pages, out, **how)
    expected = attended(case, cache, width, trees_only)
    tolerance = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[out.dtype]
    for token in range(len(out)):
        if token in expected:
            torch.testing.assert_close(out[token].cpu().double(), expected[token], atol=tolerance, rtol=tolerance)
        else:
            assert (out[token] == 7).all(), "a request that was to be left alone"


@runs_triton
@settings(max_examples=60 if GPU else 8, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from([(2, 2, 64), (6, 2, 80), (4, 1, 128), (3, 1, 256), (4, 4, 32), (8, 1, 32)]),
    st.sampled_from([16, 48]),
    st.sampled_from([torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]),  # numpy has no bfloat16
    st.booleans(),
)
def test_attention_by_triton(
    seed: int, shape: tuple[int, int, int], page: int, dtype: torch.dtype, trees_only: bool
) -> None:
    case = random_case(seed, width=12, requests=3)
    check(case, random_cache(case, *shape, page, dtype, seed), trees_only)


@runs_triton
def test_attention_with_keys_in_parts_by_triton() -> None:
    case = random_case(5, width=64, requests=3)
    long = case.seq_lens + 400
    more = case._replace(
        seq_lens=long,
        masks=NodeMasks(case.masks.masks, case.masks.prompts + 400),
        sees=[np.pad(seen, (400, 0), constant_values=True) for seen in case.sees],
        stands=[at + 400 for at in case.stands],
    )
    assert split_keys(len(long), 4, 2, 65, int(long.max())) > 1
    check(more, random_cache(more, 4, 2, 64, 16, torch.float32, 1))


def test_keys_are_split_where_that_fills_a_gpu() -> None:
    assert [split_keys(requests, 32, 8, 33, 1 << 17) for requests in (1, 8, 64)] == [16, 2, 1]
    assert split_keys(1, 32, 8, 33, 100) == 1, "a short context is read at once"


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from([(32, 8), (28, 4), (64, 8), (8, 1), (4, 2), (9, 3)]),
    st.integers(1, 300),
    st.integers(2, 65),
    st.integers(1, 1 << 17),
    st.data(),
)
def test_scratch_is_enough_for_all_smaller_steps(
    heads: tuple[int, int], requests: int, queries: int, keys: int, data: st.DataObject
) -> None:
    """Of fewer queries keys are split further, as in CUDA graphs of K/2 and K/4 draft tokens."""
    size = scratch_size(requests, *heads, 128, queries, keys)
    n, q, k = (data.draw(st.integers(1, most)) for most in (requests, queries, keys))
    parts = split_keys(n, *heads, q, k)
    rows = n * q * heads[0] * parts  # each of what a head reads, its maximum and its sum
    assert parts == 1 or rows * (128 + 2) <= size
