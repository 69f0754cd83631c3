"""SGLang's own attention backends with our trees: `attention_backends.py`, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run_interpreted(*command: object) -> str:
    """What Python prints, in a process of its own with Triton's interpreter."""
    path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    env = os.environ | {"PYTHONPATH": path, "TRITON_INTERPRET": "1"}
    run = subprocess.run(
        [sys.executable, *map(str, command)], env=env, capture_output=True, text=True, check=False, timeout=600
    )
    assert run.returncode == 0, run.stdout[-8000:] + run.stderr[-4000:]
    return run.stdout


@pytest.mark.parametrize("which", ["not extended", pytest.param("extended", marks=pytest.mark.extended)])
def test_attention_backends(tiny, monkeypatch, which):
    pytest.importorskip("triton")
    monkeypatch.setenv("TINY_MODEL", str(tiny))
    run_interpreted("-m", "pytest", "-q", HERE / "attention_backends.py", "-m", which)
