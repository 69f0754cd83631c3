"""Files of results and their manifests: what was changed by hand, or came from nowhere, is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from results import block

from bench.lib import results, serving
from bench.lib.machine import INSTRUCTIONS, instructions

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "bench" / "results"


def test_all_files_of_results_are_as_they_were_written() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bench.lib.results", str(HERE)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_benchmark_writes_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("{}")
    monkeypatch.setattr(sys, "orig_argv", ["python", str(ROOT / "bench" / "x.py")])
    monkeypatch.setattr(sys, "argv", [str(ROOT / "bench" / "x.py"), "--trace", str(trace), "--tokens", "3 4"])
    path = tmp_path / "folder" / "x.json"
    results.write_json(path, {"speed": 1.5}, data=[trace])
    manifest = results.checked(path)
    assert manifest["command"] == "python bench/x.py --trace trace.jsonl --tokens '3 4'"
    assert manifest["data"] == {"trace.jsonl": results.sha256(trace)}
    assert manifest["versions"]["python"] and manifest["machine"]["cores"] and manifest["commit"]
    assert manifest["machine"]["instructions"] == instructions() in ("", *INSTRUCTIONS)


@pytest.mark.parametrize("wrong", ["a row by hand", "no manifest", "damaged", "left over", "another format"])
def test_what_is_not_as_it_was_written(tmp_path: Path, wrong: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    results.write_json(path, {"rows": [1.0]})
    if wrong == "a row by hand":
        path.write_text(json.dumps({"rows": [1.0, 2.0]}))
    elif wrong == "no manifest":
        results.manifest_of(path).unlink()
    elif wrong == "damaged":
        results.manifest_of(path).write_text("{}")
    elif wrong == "another format":
        manifest = results.manifest_of(path)
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 2}))
    else:
        path.unlink()
    assert results.check(tmp_path) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "x.json" in said


def test_results_go_on_only_with_the_same_settings_and_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"max_tokens": 8, "device": "cpu", "arms": {"plain": serving.asdict(serving.PRESETS["plain"])}}
    blocks = [block("plain", 0), block("plain", 1, errors=["refused"])]
    serving.Report(tmp_path / "serve.json", settings, blocks).write()
    again = serving.Report.open(tmp_path / "serve.json", settings, fresh=False)
    assert again.answered("plain", 1, 0) == 1, "a pass with a block that failed is not whole"
    assert again.answered("plain", 4, 0) == again.answered("plain", 1, 1) == 0
    with pytest.raises(ValueError, match="max_tokens 8, not 16"):
        serving.Report.open(tmp_path / "serve.json", {**settings, "max_tokens": 16}, fresh=False)
    other = {**settings, "arms": {"plain": serving.asdict(serving.PRESETS["ngram"])}}
    with pytest.raises(ValueError, match="measured with arms"):
        serving.Report.open(tmp_path / "serve.json", other, fresh=False)
    assert serving.Report.open(tmp_path / "serve.json", other, fresh=True).blocks == []
    elsewhere = results.origin() | {"commit": "another"}
    monkeypatch.setattr(results, "origin", lambda: elsewhere)
    with pytest.raises(ValueError, match=r"measured with commit .*--fresh"):
        serving.Report.open(tmp_path / "serve.json", settings, fresh=False)
    (tmp_path / "serve.json").write_text("{}")
    with pytest.raises(ValueError, match="no results of this benchmark"):
        serving.Report.open(tmp_path / "serve.json", settings, fresh=False)
