"""What an operation cannot take is named: shapes, types and devices of tensors by `check_tensor`, the rest by each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from freedraft_kernels import (
    KVPool,
    NodeMasks,
    TreeBatch,
    TreeQueries,
    Verification,
    newest_tokens,
    top_tokens,
    tree_attention,
    tree_inputs,
    verify,
    write_tree_queries,
)


def ints(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def longs(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int64)


TREE = TreeBatch(ints(2, 4), ints(2, 4), ints(2, 4), ints(2))
PATHS = Verification(ints(2, 3), ints(2), ints(2, 3))
QUERIES = TreeQueries(ints(3), ints(2), ints(8), longs(8), ints(2))


def attend(dim: int = 16, queries: TreeQueries = QUERIES, out: int = 8, **more: Any) -> None:
    """Attention of two requests with four tokens each."""
    query, cache = torch.zeros(8, 4, 16), torch.zeros(3, 16, 2, dim)
    sizes = {"scale": 1.0, "max_queries": 9, "max_seq_len": 48} | more
    tree_attention(query, cache, cache, queries, ints(2, 3), torch.zeros(out, 4, 16), **sizes)


def newest(**changed: torch.Tensor) -> None:
    given = {"tokens": ints(2, 5), "lengths": ints(2), "slots": ints(1), "gained": ints(1)}
    newest_tokens(**given | {"out": ints(1, 5), "drafts": longs(1, 2)} | changed)


CALLS: list[tuple[Callable[[], Any], str]] = [
    (lambda: TreeBatch(ints(2, 3), ints(2, 4), ints(2, 3), ints(2)), r"parents has shape \[2, 4\], expected \[2, 3\]"),
    (lambda: TreeBatch(longs(2, 3), ints(2, 3), ints(2, 3), ints(2)), "tokens is torch.int64, expected torch.int32"),
    (lambda: TreeBatch(ints(2, 0), ints(2, 0), ints(2, 0), ints(2)), r"expected \[batch, nodes >= 1\]"),
    (lambda: TreeBatch(ints(2, 3), ints(2, 3), ints(3, 2).t(), ints(2)), "depths is not contiguous"),
    (lambda: TreeBatch.from_numpy(*np.zeros((3, 2, 3), np.int32), np.zeros(1, np.int32)), "counts has shape"),
    (lambda: tree_inputs(TREE, longs(3), layout="query"), r"seq_lens has shape \[3\], expected \[2\]"),
    (lambda: tree_inputs(TREE, longs(2), layout="square"), "layout is 'square'"),  # type: ignore[arg-type]
    (lambda: tree_inputs(TREE, longs(2), layout="full"), "seq_lens_sum is None: the full layout needs it"),
    (lambda: tree_inputs(TREE, longs(2), layout="query", backend="cuda"), "backend is 'cuda'"),  # type: ignore[arg-type]
    (lambda: verify(TREE, longs(2, 3)), r"targets has shape \[2, 3\], expected \[2, 4\]"),
    (lambda: verify(TREE, longs(2, 4), backend="triton"), "cannot run on a cpu tensor"),
    (lambda: KVPool([]), "at least one buffer"),
    (lambda: KVPool([ints(8, 2), ints(9, 2)]), "KV buffer 1 has 9 slots on cpu, buffer 0 has 8"),
    (lambda: KVPool([ints(8, 4, 2).transpose(1, 2)]), "rows of KV buffer 0 are not contiguous"),
    (lambda: KVPool([ints(8)]), "KV buffer 0 has shape"),
    (lambda: KVPool([ints(8, 2)]).compact(longs(2, 2), PATHS), "at most nodes"),
    (lambda: KVPool([ints(8, 2)]).compact(longs(2, 4).to("meta"), PATHS), "slots is on meta"),
    (lambda: top_tokens(torch.zeros(2, 4), 5), "logits has shape"),
    (lambda: newest(tokens=torch.zeros(2, 5)), "tokens is torch.float32"),
    (lambda: newest(out=ints(1, 4)), "out has shape"),
    (lambda: attend(dim=8), "a divisor of 4"),
    (lambda: attend(out=7), "out has another shape"),
    (lambda: attend(queries=TreeQueries(ints(3), ints(2), ints(8), longs(8), ints(1))), "trees has shape"),
    (lambda: attend(max_seq_len=4096, scratch=torch.zeros(9)), "scratch has 9 numbers, expected"),
    (
        lambda: write_tree_queries(NodeMasks(longs(2, 65), ints(2)), longs(2), ints(3), QUERIES, *[ints(8)] * 3),
        "at most 64",
    ),
]


@pytest.mark.parametrize(("call", "words"), CALLS, ids=[words for _, words in CALLS])
def test_what_cannot_be_taken_is_named(call: Callable[[], Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()
