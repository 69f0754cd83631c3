"""Draft trees on the device: token ids, positions and masks of their pass, what FlashAttention reads of a paged cache
for them, and the package without Triton. SGLang's own tensors are compared in tests/sglang/attention_backends.py."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from freedraft_kernels import tree_inputs
from freedraft_kernels.device.tree_pages import PagedKeys, write_tree_pages
from hypothesis import given, settings
from hypothesis import strategies as st
from implementations import DEVICE, EXAMPLES, by_each, runs_triton

from freedraft.draft import DraftBatch
from tests.support.random_trees import batches, on, path_to


def test_works_without_triton() -> None:
    program = """
import sys
sys.modules["triton"] = None
import torch, freedraft_kernels as k
from freedraft_kernels.dispatch import use_triton
ints = lambda *values: torch.tensor(values, dtype=torch.int32)
tree = k.TreeBatch(ints([5, 7]), ints([-1, 0]), ints([0, 1]), ints(2))
assert k.verify(tree, torch.tensor([[7, 8]])).tokens.tolist() == [[7, 8]]
assert not use_triton(torch.device("cuda"))
"""
    source = Path(sys.modules["freedraft_kernels"].__file__ or "").parent.parent
    subprocess.run([sys.executable, "-c", program], check=True, cwd=source)


def expected(drafts: DraftBatch, lengths: list[int]) -> tuple[list[int], list[int], list[bool]]:
    ids, positions, cells = [], [], []
    for b in range(drafts.batch_size):
        for i in range(drafts.max_nodes):
            inside = i < drafts.counts[b]
            path = path_to(drafts, b, i) if inside else [i]
            ids.append(int(drafts.tokens[b, i]) if inside else 0)
            positions.append(lengths[b] + (len(path) - 1 if inside else 0))
            cells += [True] * lengths[b] + [j in path for j in range(drafts.max_nodes)]
    return ids, positions, cells


def over_nodes(lengths: list[int], nodes: int) -> list[int]:
    """The mask's cells of each node over the nodes of its request."""
    rows = [length for length in lengths for _ in range(nodes)]
    starts = np.cumsum([0, *(length + nodes for length in rows)])
    return [int(start) + length + j for start, length in zip(starts, rows, strict=False) for j in range(nodes)]


@by_each
@settings(max_examples=EXAMPLES, deadline=None)
@given(batches())
def test_tree_inputs(backend: str, device: str, case: tuple[DraftBatch, int, int]) -> None:
    """Also masks with more room than the contexts take, and with less."""
    drafts, _, seed = case
    tree, nodes = on(device, drafts), drafts.max_nodes
    lengths = [(seed >> (3 * b)) % (1200 if seed % 3 == 0 else 23) for b in range(drafts.batch_size)]
    seq_lens = torch.tensor(lengths, dtype=torch.int32 if seed % 2 else torch.int64, device=device)
    for bound in (sum(lengths), seed % (2 * sum(lengths) + 1)):
        inputs = tree_inputs(tree, seq_lens, bound, backend=backend)
        ids, positions, cells = expected(drafts, lengths)
        assert inputs.input_ids.dtype == inputs.positions.dtype == torch.int64 and inputs.mask.dtype == torch.bool
        assert inputs.input_ids.tolist() == ids and inputs.positions.tolist() == positions
        size = nodes * (bound + nodes * drafts.batch_size)
        assert inputs.mask.shape == (size,)
        assert inputs.mask[: len(cells)].tolist() == cells[:size]
        own = tree_inputs(tree, seq_lens, bound, cached=False, backend=backend)
        assert own.input_ids.tolist() == ids and own.positions.tolist() == positions
        of_nodes = [j for j in over_nodes(lengths, nodes) if j < size]
        assert own.mask.shape == (size,) and own.mask[of_nodes].tolist() == [cells[j] for j in of_nodes]
        assert not cells or own.mask[0] == cells[0], "which FA3 reads for padding"


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
