"""The implementations that a test of an operation runs: the reference, and Triton on a GPU or in its interpreter.

The interpreter has to be chosen before Triton is first imported, and other tests import Triton: without a GPU,
`test_triton.py` runs these tests in a process of its own.
"""

from __future__ import annotations

import functools

import pytest
import torch
from freedraft_kernels.dispatch import interpreting

GPU = torch.cuda.is_available() and not interpreting()
DEVICE = "cuda" if GPU else "cpu"
# Hypothesis's examples of a test: the interpreter is slow.
EXAMPLES = 15 if interpreting() else 60
if interpreting():
    from triton.runtime import interpreter

    # Else it replaces the whole language at each launch and at each call within a kernel, a third of all time.
    interpreter._patch_lang = functools.cache(interpreter._patch_lang)
    interpreter._LangPatchScope.restore = lambda self: None
runs_triton = pytest.mark.skipif(not (GPU or interpreting()), reason="no GPU: run by test_in_the_interpreter")
by_each = pytest.mark.parametrize(
    ("backend", "device"),
    [pytest.param("reference", "cpu", id="reference"), pytest.param("triton", DEVICE, id="triton", marks=runs_triton)],
)
