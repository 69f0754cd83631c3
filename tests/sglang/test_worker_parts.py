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


def test_sampled_trees_are_verified_in_parts(monkeypatch):
    """As all at once, with the probabilities of a few requests in memory."""
    pytest.importorskip("sglang")
    import torch
    from freedraft_kernels import TreeBatch
    from sglang.srt.runtime_context import get_context

    from freedraft.engines.sglang import verify
    from freedraft.engines.sglang.accepted import AcceptedTokens
    from tests.sglang.test_drafting import VOCAB_SIZE, decoding_batch, request

    size, nodes = 42, 5
    with get_context().override_server_args(device="cpu", enable_custom_logit_processor=True):
        settings = [
            {"temperature": 0.5 + b / 8, "top_k": 3 + b, "top_p": 0.7, "min_p": 0.01 * (b % 5)} for b in range(size)
        ]
        requests = [request(str(b), [1] * (b + 1), **given) for b, given in enumerate(settings)]
        batch = decoding_batch({each: [5] for each in requests}, AcceptedTokens(256, 6, "cpu"))
    batch.sampling_info.sampling_seed = torch.arange(size)
    tree = random_tree(np.random.default_rng(1), size, nodes)
    tree.tokens[:] = np.random.default_rng(2).integers(0, 3, tree.tokens.shape)
    there = TreeBatch.from_numpy(tree.tokens, tree.parents.clip(-1), tree.depths, tree.counts, torch.device("cpu"))
    logits = 4 * torch.randn(size * nodes, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    logits[:, :3] += 30.0
    verifier = verify.TreeVerifier.__new__(verify.TreeVerifier)
    verifier._in_turns_with_min_p, verifier._device = False, "cpu"
    held, original = [], verify.target_probs

    def target_probs(logits, *args, **kwargs):
        held.append(len(logits))
        return original(logits, *args, **kwargs)

    monkeypatch.setattr(verify, "target_probs", target_probs)
    whole = verifier._verify(batch, there, logits.clone())
    monkeypatch.setattr(verify, "MAX_PROBABILITIES", 7 * nodes * VOCAB_SIZE)
    parts = verifier._verify(batch, there, logits.clone())
    assert held == [size, *[4] * 10, 2] and int((whole.lengths > 1).sum()) > 2
    for name in ("accepted", "lengths", "tokens", "bonus"):
        assert torch.equal(getattr(whole, name), getattr(parts, name)), name
