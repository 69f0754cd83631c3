"""Records for the compiled scorers: a request's sources, and the drafted tree."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from freedraft.compiled import lean
from sssd_plugin.pointers import array_at


class Store(NamedTuple):
    """The sub-indices that one request drafts from."""

    table: NDArray[np.int64]  # [J, TABLE_COLUMNS], rows as in `View.table`
    size: int  # tokens in all of them


class Tree(NamedTuple):
    """One row of a `DraftBatch`: tokens, parents, depths int32 [N]; scores float32 [N]; kinds uint16 [N]."""

    tokens: NDArray[np.int32]
    parents: NDArray[np.int32]
    depths: NDArray[np.int32]
    scores: NDArray[np.float32]
    kinds: NDArray[np.uint16]


def record(**fields: str) -> np.dtype:
    """Return a record of these fields, each with numpy's code of its type."""
    return np.dtype(list(fields.items()), align=True)


@lean
def store_of(view, group):
    """Return the `Store` of a group of requests, without owning it; view: table and bounds of a `View`."""
    table, bounds = view
    first, size = bounds[group], 0
    shape = bounds[group + 1] - first, table.shape[1]
    rows = array_at(table.ctypes.data + first * table.strides[0], shape, np.int64)
    for j in range(len(rows)):
        size += rows[j, 3]
    return Store(rows, size)


@lean
def add_node(tree, i, token, parent, score, kind):
    """Write node i; the root's parent is -1."""
    tree.tokens[i] = token
    tree.parents[i] = parent
    tree.depths[i] = tree.depths[parent] + 1 if parent >= 0 else 0
    tree.scores[i] = score
    tree.kinds[i] = kind


@lean(inline="always")
def write_context(request_tokens, tokens, parents, node, context):
    """Write the last tokens at a node of a tree, newest first, up to the size of `context`, and return their number.
    request_tokens: int32 [n], the last one is the root; tokens, parents: int32 [N], of the tree."""
    filled, i = 0, len(request_tokens) - 1
    while node > 0 and filled < len(context):
        context[filled] = tokens[node]
        filled += 1
        node = parents[node]
    while i >= 0 and filled < len(context):
        context[filled] = request_tokens[i]
        filled += 1
        i -= 1
    return filled
