"""What an operation cannot take is named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from freedraft_kernels import (
    KVPool,
    TreeBatch,
    TreeQueries,
    tree_attention,
    tree_inputs,
    verify,
)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def longs(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


TREE = TreeBatch(ints(2, 4), ints(2, 4), ints(2, 4), ints(2))
QUERIES = TreeQueries(ints(3), ints(2), ints(8), longs(8), ints(2))


def attend(dim: int = 16, queries: TreeQueries = QUERIES, out: int = 8, **more: Any) -> None:
    """Attention of two requests with four tokens each."""
    query, cache = torch.zeros(8, 4, 16), torch.zeros(3, 16, 2, dim)
    sizes = {"scale": 1.0, "max_queries": 9, "max_seq_len": 48} | more
    tree_attention(query, cache, cache, queries, ints(2, 3), torch.zeros(out, 4, 16), **sizes)


CALLS: list[tuple[Callable[[], Any], str]] = [
    (lambda: tree_inputs(TREE, longs(2), layout="square"), "layout is 'square'"),  # type: ignore[arg-type]
    (lambda: tree_inputs(TREE, longs(2), layout="full"), "seq_lens_sum is None: the full layout needs it"),
    (lambda: tree_inputs(TREE, longs(2), layout="query", backend="cuda"), "backend is 'cuda'"),  # type: ignore[arg-type]
    (lambda: verify(TREE, longs(2, 4), backend="triton"), "cannot run on a cpu tensor"),
    (lambda: KVPool([]), "at least one buffer"),
    (lambda: KVPool([ints(8, 2), ints(9, 2)]), "KV buffer 1 has 9 slots on cpu, buffer 0 has 8"),
    (lambda: KVPool([ints(8, 4, 2).transpose(1, 2)]), "rows of KV buffer 0 are not contiguous"),
    (lambda: KVPool([ints(8)]), "KV buffer 0 has shape"),
    (lambda: attend(max_seq_len=4096, scratch=torch.zeros(9)), "scratch has 9 numbers, expected"),
]


@pytest.mark.parametrize(("call", "words"), CALLS, ids=[words for _, words in CALLS])
def test_what_cannot_be_taken_is_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
