"""Draft trees on the device, token ids, positions and masks of their pass, and the package without Triton."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from freedraft_kernels import tree_inputs
from hypothesis import given, settings
from implementations import EXAMPLES, by_each

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
