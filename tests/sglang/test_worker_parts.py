"""The pieces of the worker that need no engine, against slow obvious versions."""

from __future__ import annotations

import types

import numpy as np
import pytest

from freedraft.draft import DraftBatch
from freedraft.engines.sglang.requests import RequestTokens


def random_tree(rng, batch, nodes):
    out = DraftBatch.empty(batch, nodes)
    for b in range(batch):
        out.counts[b] = rng.integers(1, nodes + 1)
        out.parents[b, 0] = -1
        out.parents[b, out.counts[b] :] = rng.integers(-1, nodes, nodes - out.counts[b])  # padding holds anything
        for i in range(1, out.counts[b]):
            out.parents[b, i] = rng.integers(0, i)
    return out


def test_tree_links():
    pytest.importorskip("sglang")
    from freedraft.engines.sglang.worker import tree_links

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


def test_documents_of_chunks():
    pytest.importorskip("sglang")
    from freedraft.engines.sglang.worker import documents_of

    mark = -(2**31)
    chunks = [[1, 2, 3], [4, 5], [mark, 6], [7], [mark, 8]]
    assert [d.tolist() for d in documents_of(chunks)] == [[1, 2, 3, 4, 5], [6, 7], [8]]
    assert documents_of([]) == [] and documents_of([[]]) == []


def request(rid, prompt, output=(), padded=None):
    return types.SimpleNamespace(
        rid=rid,
        origin_input_ids=list(prompt if padded is None else padded),
        origin_input_ids_unpadded=list(prompt),
        output_ids=list(output),
    )


def advance(tokens, ids, totals, gained):
    return tokens.advance(ids, np.array(totals), np.array(gained, np.int32))


def test_requests_through_their_life():
    tokens = RequestTokens()
    a, b = request("a", [1, 2, 3]), request("b", [4, 5])
    assert tokens.begin(a).tolist() == [1, 2, 3]
    assert tokens.begin(a) is None, "a later chunk of the same prefill begins nothing"
    assert tokens.begin(b).tolist() == [4, 5]
    assert advance(tokens, ["a", "b"], [4, 3], [1, 1]) == []
    assert advance(tokens, ["b", "a"], [5, 5], [2, 1]) == [], "rows may change places"
    # b is retracted: what its last step gained is lost, and it is prefilled again with its output so far.
    b.output_ids = [9]
    assert tokens.begin(b).tolist() == [4, 5, 9]
    assert advance(tokens, ["b"], [4], [1]) == []
    # An unknown request, and one whose copy is off, are rebuilt.
    assert advance(tokens, ["a", "c"], [9, 7], [1, 2]) == [0, 1]
    c = request("c", [1, 2, 3], [7, 8, 6, 6])
    assert tokens.rebuild(c, 5).tolist() == [1, 2, 3, 7, 8]
    tokens.forget("a")
    assert tokens.begin(a) is not None


def test_image_padding_is_not_indexed():
    tokens = RequestTokens()
    r = request("r", [1, 2], padded=[10**9] * 6)
    assert tokens.begin(r).tolist() == [1, 2]
    assert advance(tokens, ["r"], [7], [1]) == [], "lengths are the KV cache's"
    r.output_ids = [3, 4]
    assert tokens.rebuild(r, 7).tolist() == [1, 2, 3]


def test_aborted_requests_do_not_pile_up():
    tokens = RequestTokens()
    for i in range(200):
        tokens.begin(request(str(i), [1]))
        swept = tokens.sweep(["0"], 4)
        if swept:
            break
    assert "0" not in swept and len(swept) == 80
