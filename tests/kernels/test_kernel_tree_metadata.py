"""What FlashAttention reads of a paged cache for draft trees, written out. SGLang's own tensors are compared in
tests/sglang/attention_backends.py."""

from __future__ import annotations

import numpy as np
import torch
from freedraft_kernels import tree_inputs
from freedraft_kernels.device.tree_pages import PagedKeys, write_tree_pages
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import DEVICE, EXAMPLES, runs_triton

from freedraft.draft import DraftBatch
from tests.support.random_trees import batches, on, path_to


def empty(rows: int, pages: int) -> PagedKeys:
    lengths, ends, table = (torch.zeros(shape, dtype=torch.int32) for shape in (rows, rows + 1, (rows, pages)))
    return PagedKeys(lengths.to(DEVICE), ends.to(DEVICE), table.to(DEVICE))


@runs_triton
@settings(max_examples=EXAMPLES, deadline=None)
@given(batches(), st.integers(0, 3), st.sampled_from([1, 4]))
def test_tree_pages_by_triton(case: tuple[DraftBatch, int, int], padding: int, page: int) -> None:
    """Also of requests that pad a graph, and of contexts that fill several blocks."""
    drafts, seed, _ = case
    rng, batch, nodes = np.random.default_rng(seed), drafts.batch_size, drafts.max_nodes
    lengths = [int(n) for n in rng.integers(0, rng.choice([9, 2300]), batch)]
    inputs = tree_inputs(on(DEVICE, drafts), torch.tensor(lengths).to(DEVICE), sum(lengths))
    rows, slots = rng.permutation(batch + 2)[:batch], rng.permutation((batch + 2) * (2400 + nodes))
    table = torch.from_numpy(slots.reshape(batch + 2, -1).astype(np.int32))
    past, own = empty(batch + padding, 2400), empty((batch + padding) * nodes, nodes)
    padded = (torch.tensor([*given, *[value] * padding]).to(DEVICE) for given, value in ((lengths, 1), (rows, 0)))
    write_tree_pages(inputs.mask, inputs.positions, *padded, table.to(DEVICE), past, own, page_size=page)
    assert past.lengths.tolist() == [*lengths, *[1] * padding]
    for keys in (past, own):
        assert keys.ends.tolist() == [0, *keys.lengths.cumsum(0).tolist()]
    for b, length in enumerate(lengths):
        read = past.pages[b].tolist()
        assert read[: -(-length // page)] == (table[rows[b], :length:page] // page).tolist() and not any(read[length:])
        after = table[rows[b], length : length + nodes].tolist()
        for i in range(nodes):
            path = path_to(drafts, b, i) if i < drafts.counts[b] else [i]
            first = [after[j] for j in path]
            row = own.pages[b * nodes + i].tolist()
            assert int(own.lengths[b * nodes + i]) == len(path) and row[: len(path)] == first
            assert row[len(path) :] == [slot for slot in after if slot not in first]
    assert own.lengths[batch * nodes :].eq(nodes).all()
    assert own.pages[batch * nodes :].tolist() == [table[0, 1 : 1 + nodes].tolist()] * (padding * nodes)
