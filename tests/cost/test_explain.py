from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from known import LLAMA3_8B
from typer.testing import CliRunner

from freedraft.cli import app
from freedraft.config import ConfigError
from freedraft.cost import profiling
from freedraft.cost.explain import expected_tokens, explain, parse_curve
from freedraft.cost.hardware import HardwareProfile
from freedraft.cost.model_shape import ModelShape
from freedraft.cost.profiling import write
from freedraft.cost.roofline import Roofline
from tests.support.disks import full_disk


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3_8B))
    return tmp_path


def test_lengths_shrink_as_batches_grow_and_beat_plain() -> None:
    rows = explain(Roofline(ModelShape.from_config(LLAMA3_8B), HardwareProfile.load("h200")), 1024)
    lengths = [row.best for row in rows]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] >= 16 and lengths[-1] <= 2
    assert all(row.speedup >= 1.0 for row in rows)
    # 16 GB of weights at 4.8 TB/s; the cache adds little.
    assert rows[0].plain == pytest.approx(15e9 / 4.8e12, rel=0.05)


def test_the_best_length_is_the_best_of_all() -> None:
    roofline = Roofline(ModelShape.from_config(LLAMA3_8B), HardwareProfile.load("l40s"))
    curve = {1: 1.0, 2: 1.4, 8: 2.0}
    for row in explain(roofline, 4096, max_nodes=12, curve=curve):
        rates = [
            float(expected_tokens(np.array([n]), curve)[0]) / float(roofline.seconds(row.batch, row.batch * n, 4096))
            for n in range(1, 13)
        ]
        assert row.best == int(np.argmax(rates)) + 1
        assert row.speedup == pytest.approx(max(rates) / rates[0])


def test_curves() -> None:
    assert parse_curve("8:1.7,4:1.5") == {1: 1.0, 4: 1.5, 8: 1.7}
    for wrong in ("", "4", "4:x", "4:5", "4:0.5", "4:1.7,8:1.5"):
        with pytest.raises(ConfigError, match="--tokens-per-step"):
            parse_curve(wrong)


def test_the_command_prints(model: Path) -> None:
    result = CliRunner().invoke(app, ["explain", "--model", str(model), "--hardware", "h100"])
    assert result.exit_code == 0, result.output
    assert "gain" in result.output and "256" in result.output


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["--hardware", "h1000"], "did you mean"),
        (["--hardware", "h100", "--dtype", "int7"], "int7"),
        (["--hardware", "h100", "--tokens-per-step", "x"], "--tokens-per-step"),
        (["--windows", "512:0.9"], "'--windows' is no longer supported: windowed drafts are judged by measured times"),
        (["--windows=512:0.9", "--memory", "80"], "'--windows' is no longer supported"),
        (["--plot", "x.png"], "'--plot' is no longer supported"),
    ],
)
def test_wrong_arguments_are_named(model: Path, arguments: list[str], word: str) -> None:
    result = CliRunner().invoke(app, ["explain", "--model", str(model), *arguments])
    assert result.exit_code == 2 and word in result.output and "Traceback" not in result.output


def test_a_machine_is_measured_and_its_profile_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(profiling, "_SECONDS", 0.3)  # as exact as the bounds below ask for
    out = tmp_path / "mine.yaml"
    result = CliRunner().invoke(app, ["profile", "--device", "cpu", "--name", "mine", "--out", str(out)])
    assert result.exit_code == 0, result.output
    profile = HardwareProfile.load(out)
    assert profile.source == "measured" and profile.name == "mine"
    assert 1e9 < profile.bandwidth < 1e13 and 1e9 < profile.flops("float32") < 1e15
    again = CliRunner().invoke(app, ["profile", "--device", "tpu", "--out", str(out)])
    assert again.exit_code == 2 and "tpu" in again.output
    with pytest.raises(ConfigError, match="--force"):
        write(profile, out)
    with full_disk(20), pytest.raises(ConfigError, match="cannot write"):
        write(profile, out, force=True)
    assert HardwareProfile.load(out) == profile  # the one that was there
    write(profile, out, force=True)
    assert HardwareProfile.load(out) == profile
