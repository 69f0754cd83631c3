"""bench/gpu.sh: what is missing is said before anything is begun, and its arms are such as bench/serve.py takes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench import serve

SCRIPT = Path(serve.__file__).with_name("gpu.sh")
CALLED = '#!/bin/bash\nprintf "%s\\0" "$@" >> calls; printf "\\n" >> calls\n'
PYTHON = f"""#!/bin/bash
case "$2" in
    *sysconfig*) echo headers ;;
    venv) printf "venv\\0$3\\0\\n" >> calls ;;
    *) exec {sys.executable} "$@" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder with the script, environments that only write down how they are called, a driver, and Spec-Bench."""
    (tmp_path / "bench" / "lib").mkdir(parents=True)
    for part in ("gpu.sh", "__init__.py", "lib/__init__.py", "lib/questions.py", "lib/made_questions.py"):
        shutil.copy(SCRIPT.parent / part, tmp_path / "bench" / part)
    (tmp_path / "pyproject.toml").touch()
    for name in ("gpu-vllm", "gpu-sglang"):
        for program in ("python", "freedraft", "pip", "hf"):
            executable(tmp_path / ".venv" / name / "bin" / program, CALLED)
        (tmp_path / ".venv" / name / "ready").touch()
    executable(tmp_path / "driver" / "nvidia-smi", "#!/bin/bash\necho 580.95.05\n")
    executable(tmp_path / "driver" / "nvcc", "")
    executable(tmp_path / "driver" / "python", PYTHON)
    for file, text in (("model/config.json", "{}"), ("headers/Python.h", ""), ("build/questions/spec_bench.jsonl", "")):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).write_text(text)
    rows = [{"question_id": i, "category": f"group {i % 6}", "turns": [f"question {i}"]} for i in range(480)]
    (tmp_path / "build/questions/spec_bench.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def executable(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def run(checkout: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    path = f"{checkout / 'driver'}:{os.environ['PATH']}"
    environment = os.environ | {"PATH": path, "MODEL": "model", "PYTHON": "python"} | variables
    script = str(checkout / "bench" / "gpu.sh")
    return subprocess.run(["bash", script], env=environment, capture_output=True, text=True, check=False)


def calls(checkout: Path) -> list[list[str]]:
    return [line.split("\0")[:-1] for line in (checkout / "calls").read_text().splitlines()]


def served(checkout: Path) -> list[list[str]]:
    return [call[1:] for call in calls(checkout) if call[:1] == ["bench/serve.py"]]


def test_arms_and_questions_are_such_as_the_benchmark_takes(checkout: Path) -> None:
    skip_set = checkout / "set.json"
    skip_set.write_text("{}")
    done = run(checkout, SKIP_SET="set.json", QUESTIONS="spec-bench agent")
    assert done.returncode == 0, done.stderr
    serving = [serve.parse(call) for call in served(checkout)]
    arms = {arm.name: arm for args in serving for arm in args.arms}
    assert {"plain", "ngram", "suffix", "sssd", "layerskip", "freedraft", "sglang-sssd", "sglang-ngram"} <= arms.keys()
    assert {arm.engine for arm in arms.values()} == {"vllm", "sglang"}
    assert (arms["layerskip"].speculative or {})["skip_set"] == "set.json"
    assert all(args.concurrency[-1] == 256 and args.repeats == 2 and args.in_turns for args in serving)
    assert all(args.chat_template_kwargs == {"enable_thinking": False} for args in serving)
    assert json.dumps([args.questions for args in serving]) == json.dumps([["spec-bench", "agent"]] * 2)


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        (
            {"MODEL": "no/such-model", "HF_ENDPOINT": "http://127.0.0.1:9"},
            "missing: the model no/such-model: no such folder, not in the cache, and the hub cannot be reached",
        ),
        ({"MODEL": "no/such-model", "HF_ENDPOINT": "no address"}, "the hub cannot be reached (unknown url type"),
        ({"QUESTIONS": "spec-bench speed_bench.jsonl"}, "missing: questions speed_bench.jsonl: cannot be read"),
        ({"QUESTIONS": "a.jsonl b.jsonl"}, "missing: questions b.jsonl: cannot be read"),
        ({"QUESTIONS": "agent long"}, "missing: 256 requests at a time, but 96 questions"),
        ({"SKIP_SET": "set.json"}, "the file set.json"),
        ({"PYTHON": "no-python"}, "PYTHON=no-python"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_begun(checkout: Path, variables: dict[str, str], says: str) -> None:
    done = run(checkout, **variables)
    assert done.returncode == 2 and says in done.stderr and "nothing was begun" in done.stderr
    assert not (checkout / "calls").exists() and not (checkout / "build" / "gpu").exists()


@pytest.mark.parametrize(("code", "ends"), [(130, True), (1, False)])
def test_what_breaks_off_the_benchmark_breaks_off_all(checkout: Path, code: int, ends: bool) -> None:
    """And where an arm has failed, the others go on."""
    python = checkout / ".venv" / "gpu-vllm" / "bin" / "python"
    python.write_text(CALLED + f'[ "$1" != bench/serve.py ] || exit {code}\n')
    assert run(checkout).returncode == code
    assert len(served(checkout)) == (1 if ends else 2)
