"""Draft trees on the device, and the package without Triton."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from freedraft_kernels import TreeBatch
from random_trees import on, random_batch


def test_copy_is_independent_of_the_host_arrays() -> None:
    drafts = random_batch(np.random.default_rng(1), 3, 5, 9)
    kept = drafts.tokens.copy(), drafts.parents.copy(), drafts.depths.copy(), drafts.counts.copy()
    tree = on("cpu", drafts)
    for array in (drafts.tokens, drafts.parents, drafts.depths, drafts.counts):
        array[...] = 99
    for tensor, array in zip((tree.tokens, tree.parents, tree.depths, tree.counts), kept, strict=True):
        assert np.array_equal(tensor.numpy(), array)


def test_bad_input() -> None:
    ints, counts = torch.zeros(2, 3, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    array, few = np.zeros((2, 3), np.int32), np.zeros(2, np.int32)
    for make, given, words in (
        (TreeBatch, (ints, ints.new_zeros(2, 4), ints, counts), r"parents has shape \[2, 4\], expected \[2, 3\]"),
        (TreeBatch, (ints.long(), ints, ints, counts), "tokens is torch.int64, expected torch.int32"),
        (TreeBatch, (ints, ints, ints, ints.new_zeros(3)), r"counts has shape \[3\], expected \[2\]"),
        (TreeBatch, (ints[:, :0], ints[:, :0], ints[:, :0], counts), r"expected \[batch, nodes >= 1\]"),
        (TreeBatch, (ints, ints, ints.new_zeros(3, 2).t(), counts), "depths is not contiguous"),
        (TreeBatch.from_numpy, (array, array[:1], array, few), "expected one shape"),
        (TreeBatch.from_numpy, (array, array, array, array[:, 0][:1]), "counts has shape"),
    ):
        with pytest.raises(ValueError, match=words):
            make(*given)


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
try:
    k.verify(tree, torch.tensor([[7, 8]]), backend="triton")
except ValueError as error:
    assert "not installed" in str(error)
else:
    raise AssertionError
"""
    source = Path(sys.modules["freedraft_kernels"].__file__ or "").parent.parent
    subprocess.run([sys.executable, "-c", program], check=True, cwd=source)
