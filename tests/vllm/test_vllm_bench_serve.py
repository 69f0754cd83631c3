"""The serving benchmark on real servers: figures of arms that start, the name of one that does not, and resuming."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "serve.py"
QUESTIONS = [
    {"question_id": 1, "category": "qa", "turns": ["Count: one two three one two three one two three"]},
    {"question_id": 2, "category": "rag", "turns": ["Repeat this: the cat sat on the mat, the cat sat on the mat."]},
]
BROKEN = 'broken={"method": "sssd", "num_speculative_tokens": 8, "polcy": "auto"}'


def run(folder: Path, model: Path, *arms: str) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    command = [sys.executable, str(SCRIPT), "--questions", "q.jsonl", "--model", str(model), "--json", "serve.json"]
    command += ["--concurrency", "1", "--max-tokens", "12", "--warm-up", "2", "--arms", *arms]
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    return done, json.loads((folder / "serve.json").read_text())


def test_arms_that_start_are_measured_and_the_rest_is_named(demo_model: Path, tmp_path: Path) -> None:
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(q) + "\n" for q in QUESTIONS))
    model = demo_model.resolve()
    done, result = run(tmp_path, model, "plain", "sssd", BROKEN)
    assert done.returncode == 1, done.stderr
    (problem,) = result["problems"]
    assert problem.startswith("arm 'broken' is left out") and "did you mean 'policy'" in problem
    assert {(b["arm"], b["block"]) for b in result["blocks"]} == {(a, b) for a in ("plain", "sssd") for b in (0, 1)}
    assert all(b["tokens"] == [12] and not b["errors"] for b in result["blocks"])
    (row,) = (r for r in result["rows"] if r["arm"] == "sssd" and r["group"] == "all")
    assert row["identical"] == 1.0 and row["ratio"] > 0 and row["drafted_per_step"] >= 0
    assert "--enforce-eager" in result["commands"]["plain"] and "sssd" in result["commands"]["sssd"]

    # All is there: no server has to start, and nothing is asked again.
    logs = {path: path.stat().st_mtime_ns for path in (tmp_path / "logs").glob("*.log")}
    done, again = run(tmp_path, model, "plain", "sssd")
    assert done.returncode == 0, done.stdout + done.stderr
    assert again["blocks"] == result["blocks"] and again["problems"] == []
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "logs").glob("*.log")} == logs
