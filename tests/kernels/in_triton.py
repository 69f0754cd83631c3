"""Where Triton runs in tests: on a GPU, or in its interpreter.

The interpreter has to be chosen before Triton is first imported, and other tests import Triton: without a GPU, where
the environment does not say TRITON_INTERPRET=1, a file of tests runs itself in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from freedraft_kernels.dispatch import interpreting

GPU = torch.cuda.is_available() and not interpreting()
DEVICE = "cuda" if GPU else "cpu"
runs_triton = pytest.mark.skipif(not (GPU or interpreting()), reason="no GPU: run by test_in_the_interpreter")
starts_interpreter = pytest.mark.skipif(GPU or interpreting(), reason="the tests below run in this process")


def run_in_interpreter(file: str, skipped: int) -> None:
    """Run the tests of a file; all must pass but this many: the one that calls this, and those that need a GPU."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-2000:]
    assert f" passed, {skipped} skipped" in run.stdout, run.stdout[-2000:]
