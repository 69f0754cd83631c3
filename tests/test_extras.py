"""Packages that come with extras: what is said where one is missing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from freedraft.cli import app


@pytest.mark.parametrize(
    ("command", "module"),
    [("bayesian", "bayes_opt.acquisition"), ("knn", "sklearn.cluster"), ("disco", "sklearn.neural_network")],
)
def test_calibrations_say_what_they_need_before_they_load_a_model(
    command: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    given = [str(tmp_path / "none.jsonl"), "--out", str(tmp_path / "out.json")]
    given += [] if command == "disco" else ["--model", str(tmp_path)]
    result = CliRunner().invoke(app, ["calibrate", command, *given])
    assert result.exit_code == 2
    assert f"calibrate {command} needs {module}" in result.output and "pip install '.[calibrate]'" in result.output
