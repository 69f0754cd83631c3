"""bench/gpu.sh: what is missing is said before anything is begun, and its arms are such as bench/serve.py takes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from bench import serve
from layerskip_plugin.options import LayerSkipOptions

SCRIPT = Path(serve.__file__).with_name("gpu.sh")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the script, environments that only write down how they are called, and a driver."""
    (tmp_path / "bench").mkdir()
    shutil.copy(SCRIPT, tmp_path / "bench")
    for name in ("gpu-vllm", "gpu-sglang"):
        programs = tmp_path / ".venv" / name / "bin"
        programs.mkdir(parents=True)
        (programs.parent / "done").touch()
        for program in ("python", "freedraft"):
            (programs / program).write_text('#!/bin/bash\nprintf "%s\\0" "$@" >> calls; printf "\\n" >> calls\n')
            (programs / program).chmod(0o755)
    (tmp_path / "driver").mkdir()
    (tmp_path / "driver" / "nvidia-smi").write_text("#!/bin/bash\necho a GPU\n")
    (tmp_path / "driver" / "nvidia-smi").chmod(0o755)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    return tmp_path


def run(checkout: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{checkout / 'driver'}:{os.environ['PATH']}", "MODEL": "model"} | variables
    script = str(checkout / "bench" / "gpu.sh")
    return subprocess.run(["bash", script], env=environment, capture_output=True, text=True, check=False)


def test_arms_and_questions_are_such_as_the_benchmark_takes(checkout: Path) -> None:
    skip_set = checkout / "set.json"
    skip_set.write_text("{}")
    done = run(checkout, SKIP_SET="set.json", QUESTIONS="spec-bench agent")
    assert done.returncode == 0, done.stderr
    calls = [line.split("\0")[:-1] for line in (checkout / "calls").read_text().split("\n")]
    serving = [serve.parse(call[1:]) for call in calls if call and call[0] == "bench/serve.py"]
    arms = {arm.name: arm for args in serving for arm in args.arms}
    assert {"plain", "ngram", "suffix", "sssd", "layerskip", "freedraft", "sglang-sssd", "sglang-ngram"} <= arms.keys()
    assert {arm.engine for arm in arms.values()} == {"vllm", "sglang"}
    assert (arms["layerskip"].speculative or {})["skip_set"] == "set.json"
    assert all(args.concurrency[-1] == 256 and args.repeats == 2 and args.in_turns for args in serving)
    assert json.dumps([args.questions for args in serving]) == json.dumps([["spec-bench", "agent"]] * 2)


def test_without_a_skip_set_a_search_is_asked_for(checkout: Path) -> None:
    """Which needs what the environments are given (the extra "calibrate")."""
    done = run(checkout)
    assert done.returncode == 0, done.stderr
    calls = [line.split("\0")[:-1] for line in (checkout / "calls").read_text().split("\n")]
    arms = {arm.name: arm for call in calls if call[:1] == ["bench/serve.py"] for arm in serve.parse(call[1:]).arms}
    for name, window in (("layerskip", 2048), ("freedraft", "auto")):
        speculative = dict(arms[name].speculative or {})
        options = LayerSkipOptions.read({k: v for k, v in speculative.items() if k in LayerSkipOptions.model_fields})
        assert (options.selection, options.window) == ("swift", window)
    assert ".[bench,calibrate]" in SCRIPT.read_text()


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (
            {"MODEL": "no/such-model", "HF_HUB_OFFLINE": "1", "https_proxy": "http://127.0.0.1:9"},
            "the model no/such-model",
        ),
        ({"QUESTIONS": "spec-bench speed_bench.jsonl"}, "the file speed_bench.jsonl"),
        ({"SKIP_SET": "set.json"}, "the file set.json"),
        ({"PYTHON": "no-python"}, "PYTHON=no-python"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_begun(checkout: Path, variables: dict[str, str], says: str) -> None:
    done = run(checkout, **variables)
    assert done.returncode == 2 and says in done.stderr and "nothing was begun" in done.stderr
    assert not (checkout / "calls").exists() and not (checkout / "build").exists()


def test_no_driver(checkout: Path) -> None:
    (checkout / "driver" / "nvidia-smi").write_text("#!/bin/bash\nexit 9\n")
    done = run(checkout)
    assert done.returncode == 2 and "NVIDIA driver" in done.stderr and not (checkout / "calls").exists()
