"""The serving benchmark: arms and settings from the command line, resuming, and what is said of bad input."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from results import block

from bench import serve
from bench.lib import machine, results, serving

SCRIPT = Path(serve.__file__)
GOOD = '{"question_id": 1, "category": "qa", "turns": ["What is a lighthouse for?"]}\n'


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), "--json", str(folder / "serve.json"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=os.environ, timeout=120, check=False)


def test_arms_from_the_command_line() -> None:
    assert serving.parse_arm("sssd").speculative == {
        "method": "sssd",
        "num_speculative_tokens": 8,
        "live": True,
        "isolation": "shared",
    }
    arm = serving.parse_arm('mine={"engine": "sglang", "method": "sssd", "num_speculative_tokens": 4}')
    assert (arm.name, arm.engine, arm.learns) == ("mine", "sglang", False)
    assert arm.speculative == {"method": "sssd", "num_speculative_tokens": 4}
    assert serving.parse_arm('bare={"engine": "sglang"}').speculative is None
    assert serving.parse_arm("gone=http://127.0.0.1:1/").url == "http://127.0.0.1:1"
    for wrong in ("nosuch", "x=[1]", "x=nothing"):
        with pytest.raises(argparse.ArgumentTypeError):
            serving.parse_arm(wrong)


def test_arms_of_sglang_are_kept_with_the_versions_of_its_environment(tmp_path: Path) -> None:
    given = ["--questions", "q.jsonl", "--arms", "plain", "sglang", "--sglang-python"]
    arms = serve.described(serve.parse([*given, sys.executable]))
    assert "versions" not in arms["plain"]
    assert arms["sglang"]["versions"] == machine.versions(*serve.PACKAGES)
    assert arms["sglang"]["versions"]["python"] and serving.baseline_of(arms)["sglang"] == "sglang"
    (tmp_path / "good.jsonl").write_text(GOOD)
    done = run(tmp_path, "--questions", "good.jsonl", "--arms", "sglang", "--sglang-python", "gone/python")
    assert done.returncode == 2 and done.stderr.startswith("error: --sglang-python gone/python does not run")
    assert done.stderr.count("\n") == 1 and not (tmp_path / "serve.json").exists()


def test_plain_is_that_of_the_same_engine() -> None:
    names = ("plain", "sssd", "sglang", "sglang-sssd")
    arms = {n: serving.asdict(serving.PRESETS[n]) for n in names} | {
        "far": serving.asdict(serving.parse_arm("far=http://127.0.0.1:1"))
    }
    assert serving.baseline_of(arms) == {
        "plain": "plain",
        "sssd": "plain",
        "sglang": "sglang",
        "sglang-sssd": "sglang",
        "far": "plain",
    }


def test_results_go_on_only_with_the_same_settings_and_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"max_tokens": 8, "device": "cpu", "arms": {"plain": serving.asdict(serving.PRESETS["plain"])}}
    report = serving.Report(tmp_path / "serve.json", settings, [block("plain", "qa", 0)])
    report.write()
    again = serving.Report.open(tmp_path / "serve.json", settings, fresh=False)
    assert again.done == {serving.Step("plain", 1, 0, 0)}
    more = {**settings, "arms": {"ngram": serving.asdict(serving.PRESETS["ngram"])}}
    assert list(serving.Report.open(tmp_path / "serve.json", more, fresh=False).settings["arms"]) == ["plain", "ngram"]
    with pytest.raises(ValueError, match="max_tokens 8, not 16"):
        serving.Report.open(tmp_path / "serve.json", {**settings, "max_tokens": 16}, fresh=False)
    other = {**settings, "arms": {"plain": serving.asdict(serving.PRESETS["ngram"])}}
    with pytest.raises(ValueError, match="another arm 'plain'"):
        serving.Report.open(tmp_path / "serve.json", other, fresh=False)
    assert serving.Report.open(tmp_path / "serve.json", other, fresh=True).blocks == []
    elsewhere = results.origin() | {"commit": "another"}
    monkeypatch.setattr(results, "origin", lambda: elsewhere)
    with pytest.raises(ValueError, match=r"measured with another commit, .*--fresh"):
        serving.Report.open(tmp_path / "serve.json", settings, fresh=False)
    (tmp_path / "serve.json").write_text("{}")
    with pytest.raises(ValueError, match="no results of this benchmark"):
        serving.Report.open(tmp_path / "serve.json", settings, fresh=False)


def test_a_failed_block_is_asked_again(tmp_path: Path) -> None:
    settings = {"device": "cpu", "arms": {"plain": serving.asdict(serving.PRESETS["plain"])}}
    blocks = [block("plain", "qa", 0), block("plain", "rag", 1, errors=["refused"])]
    report = serving.Report(tmp_path / "serve.json", settings, blocks)
    assert report.done == {serving.Step("plain", 1, 0, 0)}


def test_an_unreachable_server_and_a_bad_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "good.jsonl").write_text(GOOD)
    (tmp_path / "bad.jsonl").write_text('{"prompt": "x"}\n')
    arguments = "--questions bad.jsonl good.jsonl --arms gone=http://127.0.0.1:1 --concurrency"
    done = run(tmp_path, *arguments.split(), "1", "8")
    assert done.returncode == 2 and "8 requests at a time, but 1 questions" in done.stderr
    done = run(tmp_path, *arguments.split(), "1")
    assert done.returncode == 1, done.stderr
    problems = json.loads((tmp_path / "serve.json").read_text())["problems"]
    assert len(problems) == 2
    assert "bad.jsonl line 1: not Spec-Bench's format" in problems[0]
    assert "arm 'gone' is left out: no server answers at http://127.0.0.1:1/health" in problems[1]
