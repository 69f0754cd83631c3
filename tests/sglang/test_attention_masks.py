"""SGLang's own attention backends with our trees: `attention_backends.py`, in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("which", ["not extended", pytest.param("extended", marks=pytest.mark.extended)])
def test_attention_backends(tiny, which):
    pytest.importorskip("triton")
    path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1", "TINY_MODEL": str(tiny)}
    command = [sys.executable, "-m", "pytest", "-q", HERE / "attention_backends.py", "-m", which]
    run = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=600)
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-4000:]
