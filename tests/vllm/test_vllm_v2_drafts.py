"""Drafts on their way to the device: tokens, masks and parents of any trees, against plain Python."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from freedraft.draft import DraftBatch
from freedraft.engines.vllm.v2.write_drafts import write_drafts

LENGTH, SLOTS, ROWS = 64, 9, 7


def random_drafts(rng: np.random.Generator, requests: int, nodes: int) -> DraftBatch:
    draft = DraftBatch.empty(requests, nodes)
    draft.tokens[:] = rng.permutation(requests * nodes).reshape(requests, nodes)
    draft.parents[:] = rng.integers(-9, 99, draft.parents.shape)  # beyond the counts: anything
    draft.counts[:] = rng.integers(0, nodes + 1, requests)
    for b in range(requests):
        draft.parents[b, 0] = -1
        for node in range(1, int(draft.counts[b])):
            draft.parents[b, node] = rng.integers(max(0, node - rng.integers(1, 9)), node)
    return draft


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_trees_and_chains_of_one_batch(seed: int) -> None:
    rng = np.random.default_rng(seed)
    requests = int(rng.integers(1, ROWS))
    draft = random_drafts(rng, requests, int(rng.integers(1, LENGTH + 2)))
    rows, slots = (rng.permutation(n)[:requests] for n in (ROWS, SLOTS))
    capacities = rng.integers(0, LENGTH + 1, requests).astype(np.int32)
    branches = rng.random(requests) < 0.6
    proposed = np.zeros((2, ROWS, LENGTH), np.int64)
    proposed[0] = -5
    parents = np.full((SLOTS, LENGTH + 1), 7, np.int32)
    counts = write_drafts(draft, capacities, rows, branches, proposed, parents, slots.astype(np.int32))
    for b in range(requests):
        nodes = list(range(1, min(int(draft.counts[b]), int(capacities[b]) + 1)))
        if not branches[b]:
            chain = [0]
            for node in nodes:
                if draft.parents[b, node] == chain[-1]:
                    chain.append(node)
            nodes = chain[1:]
        count = len(nodes)
        assert counts[b] == count
        tokens, masks = proposed[:, rows[b]]
        assert tokens.tolist() == [*draft.tokens[b, nodes], *[-5] * (LENGTH - count)]
        place = {0: 0} | {node: i for i, node in enumerate(nodes, 1)}
        followed = [place[int(draft.parents[b, node])] for node in nodes]
        assert parents[slots[b], : count + 1].tolist() == ([-1, *followed] if len(rows) else [])
        if not branches[b]:
            assert not masks.any()
            continue
        for i, node in enumerate(nodes):
            path = [node]
            while draft.parents[b, path[-1]] > 0:
                path.append(int(draft.parents[b, path[-1]]))
            assert masks[i].astype(np.uint64) == sum(1 << (place[above] - 1) for above in path)
        assert not masks[count:].any()
    others = np.setdiff1d(np.arange(ROWS), rows)
    assert (proposed[0, others] == -5).all() and not proposed[1, others].any()


def test_chains_need_no_masks() -> None:
    draft = random_drafts(np.random.default_rng(1), 2, 5)
    draft.counts[:] = 5
    proposed, parents = np.zeros((1, 2, 4), np.int64), np.zeros((2, 5), np.int32)
    rows, capacities = np.arange(2), np.full(2, 9, np.int32)
    counts = write_drafts(draft, capacities, rows, None, proposed, parents, rows.astype(np.int32))
    for b in range(2):
        assert parents[b, : counts[b] + 1].tolist() == [*range(-1, counts[b])]
    assert not write_drafts(None, capacities, rows, None, proposed, parents, rows.astype(np.int32)).any()
