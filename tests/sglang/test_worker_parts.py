"""The pieces of the worker that need no engine, against slow obvious versions."""

from __future__ import annotations

import numpy as np
import pytest

from freedraft.draft import DraftBatch


def random_tree(rng, batch, nodes):
    out = DraftBatch.empty(batch, nodes)
    for b in range(batch):
        out.counts[b] = rng.integers(1, nodes + 1)
        out.parents[b, 0] = -1
        out.parents[b, out.counts[b] :] = rng.integers(-1, nodes, nodes - out.counts[b])  # padding holds anything
        for i in range(1, out.counts[b]):
            out.parents[b, i] = rng.integers(0, i)
            out.depths[b, i] = out.depths[b, out.parents[b, i]] + 1
    return out


def test_tree_links():
    pytest.importorskip("sglang")
    from freedraft.engines.sglang.verify import tree_links

    rng = np.random.default_rng(1)
    for _ in range(30):
        tree = random_tree(rng, 3, 9)
        child, sibling = tree_links(tree)
        for b in range(3):
            n = int(tree.counts[b])
            for i in range(9):
                below = [j for j in range(n) if tree.parents[b, j] == i and i < n]
                after = [j for j in range(i + 1, n) if i and tree.parents[b, j] == tree.parents[b, i]]
                assert child[b, i] == (below[0] if below else -1)
                assert sibling[b, i] == (after[0] if after and i < n else -1)


@pytest.mark.engine_free
def test_documents_of_chunks():
    from freedraft.engines.sglang.corpora import documents_of

    mark = -(2**31)
    chunks = [[1, 2, 3], [4, 5], [mark, 6], [7], [mark, 8]]
    assert [d.tolist() for d in documents_of(chunks)] == [[1, 2, 3, 4, 5], [6, 7], [8]]
    assert documents_of([]) == [] and documents_of([[]]) == []
