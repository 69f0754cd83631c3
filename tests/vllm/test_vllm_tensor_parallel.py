"""Two tensor-parallel ranks, one core each, on both model runners: the answers are those of one rank without us."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import prompts
from tests.support.models import save, tiny_model

FOLDER = Path(__file__).parent / "v2_interpreted"
ROOT = Path(__file__).parents[2]
SSSD = {"method": "sssd", "num_speculative_tokens": 3, "policy": "fixed", "live": True, "isolation": "shared"}
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
# Heads of 64, which vLLM's CPU attention has, and enough of them for two ranks.
SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 64,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny_model(seed=7, **SHAPE), tmp_path_factory.mktemp("ranks"))


def answers(model: Path, ranks: int, changed: dict[str, str], **given: Any) -> dict[str, Any]:
    binding = "|".join(map(str, CORES[:ranks]))
    environment = {name: value for name, value in os.environ.items() if name != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment |= {"VLLM_CPU_OMP_THREADS_BIND": binding, "VLLM_USE_AOT_COMPILE": "0"} | changed
    path = [str(FOLDER)] if changed else []
    environment["PYTHONPATH"] = os.pathsep.join([*path, str(ROOT), os.environ.get("PYTHONPATH", "")])
    given["prompts"] = prompts.random_ids([12] * 4, 500, first=2, seed=3)
    command = [sys.executable, str(FOLDER / "ranks.py"), str(model), str(ranks), json.dumps(given)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-20000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith('{"answers"')]  # engines log there, too
    return json.loads(line)


@pytest.fixture(scope="module")
def plain(model: Path) -> list[list[int]]:
    (first, again) = answers(model, 1, {})["answers"]
    assert first == again
    return first


# Triton's interpreter stands in for a compiler; inductor, which vLLM compiles the embedding with, needs a real one.
INTERPRETED = {"VLLM_USE_V2_MODEL_RUNNER": "1", "TORCH_COMPILE_DISABLE": "1"}
TREES = INTERPRETED | {"INTERPRETED_ATTENTION": "triton"}


@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
@pytest.mark.parametrize("changed", [{}, INTERPRETED, TREES], ids=["V1", "V2", "V2, trees"])
def test_two_ranks_answer_as_one_does_plainly(model: Path, plain: list[list[int]], changed: dict[str, str]) -> None:
    if changed:
        pytest.importorskip("triton")
    found = answers(model, 2, changed, speculative_config=SSSD)
    assert found["answers"] == [plain, plain]
    assert found["accepted"] > 60, "the second time they are drafted from what was learnt"
