"""The implementations that a test of an operation runs: the reference, and Triton on a GPU or in its interpreter.

The interpreter has to be chosen before Triton is first imported, and other tests import Triton: without a GPU,
`test_triton.py` runs these tests in a process of its own.
"""

import pytest
import torch
from freedraft_kernels.dispatch import interpreting

from tests.support.triton_launches import interpret_quickly

GPU = torch.cuda.is_available() and not interpreting()
DEVICE = "cuda" if GPU else "cpu"
# Hypothesis's examples of a test: the interpreter is slow.
EXAMPLES = 15 if interpreting() else 60
if interpreting():
    interpret_quickly()
runs_triton = pytest.mark.skipif(not (GPU or interpreting()), reason="no GPU: run by test_in_the_interpreter")
by_each = pytest.mark.parametrize(
    ("backend", "device"),
    [pytest.param("reference", "cpu", id="reference"), pytest.param("triton", DEVICE, id="triton", marks=runs_triton)],
)
