"""Token ids, positions and masks of the reference, against plain Python."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from freedraft_kernels import tree_inputs
from hypothesis import given, settings
from random_trees import batches, on, path_to, random_batch

from freedraft.draft import DraftBatch


def expected(drafts: DraftBatch, lengths: list[int], full: bool) -> tuple[list[int], list[int], list[bool]]:
    ids, positions, cells = [], [], []
    for b in range(drafts.batch_size):
        for i in range(drafts.max_nodes):
            inside = i < drafts.counts[b]
            path = path_to(drafts, b, i) if inside else [i]
            ids.append(int(drafts.tokens[b, i]) if inside else 0)
            positions.append(lengths[b] + (len(path) - 1 if inside else 0))
            cells += [True] * (lengths[b] if full else 0) + [j in path for j in range(drafts.max_nodes)]
    return ids, positions, cells


@settings(max_examples=60, deadline=None)
@given(batches())
def test_reference(case: tuple[DraftBatch, int, int]) -> None:
    drafts, _, seed = case
    tree = on("cpu", drafts)
    lengths = [(seed >> b) % 23 for b in range(drafts.batch_size)]
    seq_lens = torch.tensor(lengths, dtype=torch.int32 if seed % 2 else torch.int64)
    for full in (False, True):
        layout = {"layout": "full", "seq_lens_sum": sum(lengths)} if full else {"layout": "query"}
        inputs = tree_inputs(tree, seq_lens, **layout, backend="reference")
        ids, positions, cells = expected(drafts, lengths, full)
        assert inputs.input_ids.dtype == inputs.positions.dtype == torch.int64 and inputs.mask.dtype == torch.bool
        assert inputs.input_ids.tolist() == ids
        assert inputs.positions.tolist() == positions
        assert inputs.mask.flatten().tolist() == cells
        assert inputs.mask.shape == ((len(cells),) if full else (tree.batch_size, tree.max_nodes, tree.max_nodes))


def test_full_mask_of_a_larger_and_a_smaller_bound() -> None:
    drafts = random_batch(np.random.default_rng(3), 3, 6, 9)
    tree, lengths = on("cpu", drafts), [4, 0, 7]
    cells = expected(drafts, lengths, True)[2]
    for bound in (sum(lengths) + 9, sum(lengths) - 4, 0):
        inputs = tree_inputs(tree, torch.tensor(lengths), layout="full", seq_lens_sum=bound, backend="reference")
        size = 6 * (bound + 18)
        assert inputs.mask.shape == (size,) and inputs.mask[: len(cells)].tolist() == cells[:size]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"seq_lens": torch.tensor([1, 2, 3])}, r"seq_lens has shape \[3\], expected \[2\]"),
        ({"seq_lens": torch.tensor([1.0, 2.0])}, "seq_lens is torch.float32"),
        ({"layout": "square"}, "layout is 'square'"),
        ({"layout": "full"}, "seq_lens_sum is None: the full layout needs it"),
        ({"layout": "full", "seq_lens_sum": -1}, "seq_lens_sum is -1"),
        ({"backend": "cuda"}, "backend is 'cuda'"),
    ],
)
def test_bad_input(changes: dict, words: str) -> None:
    tree = on("cpu", random_batch(np.random.default_rng(0), 2, 4, 9))
    with pytest.raises(ValueError, match=words):
        tree_inputs(tree, **{"seq_lens": torch.tensor([1, 2]), "layout": "query"} | changes)
