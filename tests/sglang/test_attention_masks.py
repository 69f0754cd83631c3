"""SGLang's own attention backends with our trees: its Triton kernel interpreted, what FA3 and FlashInfer take from a
mask, and what backends of several widths share."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def run_script(name, *arguments, **env):
    """What it prints, in a process of its own."""
    command = [sys.executable, str(HERE / name), *map(str, arguments)]
    path = os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run(command, env=os.environ | {"PYTHONPATH": path} | env, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout


def test_triton():
    """Trees are attended to as they should be; under a sliding window chains only (`guards.BACKENDS`)."""
    pytest.importorskip("triton")
    printed = run_script("interpreted_attention.py", TRITON_INTERPRET="1")
    *right, (_, tree_in_window) = (line.split() for line in printed.splitlines()[-5:])
    assert all(float(error) < 1e-5 for _, error in right), right
    assert float(tree_in_window) > 0.1, "SGLang counts windows by position now: draft trees there"


@pytest.fixture(scope="module")
def failed(tiny):
    """Checks of backends that fail, by name."""
    pytest.importorskip("triton")
    return json.loads(run_script("attention_backends.py", tiny, TRITON_INTERPRET="1").splitlines()[-1])


@pytest.mark.extended
def test_what_fa3_takes_from_a_mask(failed):
    """Slots of each node's ancestors and of itself, in order, and their number; also on pages of several tokens, and
    where chains are read without a mask."""
    assert "check_masks_in_fa3" not in failed, failed["check_masks_in_fa3"]


@pytest.mark.extended
def test_what_flashinfers_planner_takes_from_a_mask(failed):
    """Each node sees its request's cache, its ancestors and itself, by the slots and the mask that FlashInfer gets."""
    assert "check_masks_in_flashinfer" not in failed, failed["check_masks_in_flashinfer"]


@pytest.mark.extended
@pytest.mark.parametrize(
    "check",
    [
        # Gigabytes at long contexts, which the memory fraction does not count; and scratch for decoding under MLA.
        "check_shared_page_indices",
        "check_flashinfer_of_several_widths",
        "check_widths_that_cannot_be_captured",
        "check_encoders_are_refused",
    ],
)
def test_graphs_of_further_widths(failed, check):
    assert check not in failed, failed[check]
