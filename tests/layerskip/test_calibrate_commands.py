"""`freedraft calibrate` from files to files, on a very small model."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from test_lookahead_disco import records as verifications
from typer.testing import CliRunner

from freedraft.cli import app
from layerskip_plugin.calibrate import run as calibrate_run
from layerskip_plugin.calibrate.host_model import HostModel
from layerskip_plugin.lookahead.disco import Classifier
from layerskip_plugin.pass_times import PassTimes
from layerskip_plugin.selection.knapsack import Plan
from layerskip_plugin.selection.knn import Domains
from layerskip_plugin.skip_set import SkipSet
from tests.support.models import VOCAB_SIZE, rough_model, save, save_word_tokenizer, weaken


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layer 1 hardly does anything, so that it can be skipped."""
    made = rough_model()
    weaken(made, [1], 0.01)
    folder = save(made, tmp_path_factory.mktemp("model"))
    save_word_tokenizer(folder, VOCAB_SIZE)
    return folder


@pytest.fixture
def data(tmp_path: Path) -> Callable[..., Path]:
    def write(name: str, prompts: int = 4, words: int = 8, seed: int = 0) -> Path:
        rng = np.random.default_rng(seed)
        rows = [{"prompt": " ".join(f"w{i}" for i in rng.integers(0, VOCAB_SIZE, words))} for _ in range(prompts)]
        path = tmp_path / f"{name}.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        return path

    return write


@pytest.fixture
def run(model: Path) -> Callable[..., str]:
    def command(name: str, *arguments: object, code: int = 0) -> str:
        extra = ["--model", str(model)] if name not in ("disco", "inspect") else []
        done = CliRunner().invoke(app, ["calibrate", name, *map(str, arguments), *extra])
        assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
        assert done.exit_code == code, done.output
        return done.output

    return command


def fingerprint(model: Path) -> str:
    return HostModel.load(model).fingerprint


def test_skip_set(run: Callable, data: Callable, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "s.json"
    run("skip-set", data("one"), "--out", out, "--share", 0.34, "--tokens", 24)
    skip = SkipSet.load(out, 3, fingerprint(model))
    about = json.loads(out.read_text())["about"]
    assert skip.sublayers == (2, 3)
    assert about["data"][0]["file"] == "one" and about["hardware"] and about["model"] and about["agreement"] > 0.85
    said = run("skip-set", data("one"), "--out", out, "--share", 0.5, "--tokens", 24, code=2)
    assert "only 2 of the 3 sublayers wanted" in said


def test_the_share_of_most_tokens_per_time(
    run: Callable, data: Callable, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a share a set is chosen by the times of sublayers and head, also for the sets of domains; where nothing
    pays it is said."""
    sizes = []
    for attention, mlp, head in ((1e-5, 1e-5, 1.0), (1.0, 1e-5, 1e-5), (1.0, 1.0, 1e-5)):
        times = PassTimes(attention, mlp, head, lambda n, a=attention, m=mlp, h=head: 3 * (a + m) + h)
        monkeypatch.setattr(calibrate_run, "pass_times", lambda host, context, times=times: times)
        out = tmp_path / "s.json"
        said = run("skip-set", data("one"), "--out", out, "--tokens", 24)
        assert "of plain expected" in said, said
        skip, about = SkipSet.load(out, 3, fingerprint(model)), json.loads(out.read_text())["about"]
        sizes.append(skip.sublayers)
        assert (about["expected_over_plain"] > 1.1) == (len(sizes) > 1)
    assert 2 in sizes[1], "attention is all that there is to save"
    assert sizes[2] == (2, 3)
    files = [data(name, 5, seed=i) for i, name in enumerate(("chat", "code"))]
    run("knn", *files, "--out", tmp_path / "k.json", "--tokens", 24, "--answered", 3)
    assert {skip.sublayers for skip in Domains.load(tmp_path / "k.json", 3).sets} == {(2, 3)}


def test_knapsack(run: Callable, data: Callable, model: Path, tmp_path: Path) -> None:
    planned = tmp_path / "p.json"
    run("knapsack", data("one"), "--out", planned, "--contexts", "64,16", "--tokens", 24)
    plan = Plan.load(planned, 3, fingerprint(model))
    assert plan.contexts == (16, 64) and plan.hardware
    assert sorted(p.name for p in tmp_path.glob("*.json*")) == ["one.jsonl", "p.json"]


def test_knn(run: Callable, data: Callable, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "k.json"
    files = [data(name, 5, seed=i) for i, name in enumerate(("chat", "code"))]
    run("knn", *files, "--out", out, "--tokens", 24, "--answered", 3, "--share", 0.17)
    domains = Domains.load(out, 3, fingerprint(model))
    assert domains.names == ("chat", "code") and len(domains.sets) == 3
    log = data("log", 12)
    few = ("--tokens", 24, "--answered", 2, "--share", 0.17)
    run("knn", log, "--out", tmp_path / "c.json", "--clusters", 3, *few)
    found = Domains.load(tmp_path / "c.json", 3, fingerprint(model))
    assert found.names[0] == "cluster 1" and 2 <= len(found.names) <= 3
    run("knn", *files, "--out", out, "--anchors", "nearest", *few)
    domains, about = Domains.load(out, 3, fingerprint(model)), json.loads(out.read_text())["about"]
    assert len(domains.anchors) == 10 and about["anchors"] == "nearest"
    assert {len(skip) for skip in domains.sets} == {1}
    said = run("inspect", out)
    assert said.count("sublayers skipped") == 3 and "all domains" in said


def test_disco_trains_or_refuses(run: Callable, tmp_path: Path) -> None:
    for name, kind in (("noise", "probability"), ("entropy", "entropy")):
        replace(verifications(kind), prices=(0.3, 0.02)).save(tmp_path / f"{name}.npz")
    verifications("entropy").save(tmp_path / "unpriced.npz")
    out = tmp_path / "d.json"
    said = run("disco", tmp_path / "noise.npz", "--out", out, code=2)
    assert "a confidence threshold" in said and "nothing is written" in said and not out.exists()
    said = run("disco", tmp_path / "unpriced.npz", "--out", out, code=2)
    assert "--draft-pass and --query-token" in said and not out.exists()
    said = run("disco", tmp_path / "unpriced.npz", "--out", out, "--draft-pass", 3, "--query-token", 0, code=2)
    assert "no drafting 1" in said
    said = run("disco", tmp_path / "entropy.npz", "--out", out)
    assert Classifier.load(out, "m").model == "m"
    said = run("inspect", out, code=2)
    assert "holds no skip sets" in said


def test_inspect_shows_layers(run: Callable, tmp_path: Path) -> None:
    SkipSet.of_sublayers([2, 5], 4).save(tmp_path / "s.json", {"data": "made up"})
    said = run("inspect", tmp_path / "s.json")
    assert "#.##" in said and "##.#" in said and "data: made up" in said


@pytest.mark.parametrize(
    ("command", "options", "says"),
    [
        ("skip-set", ["--tokens", 23], "23 calibration tokens are too few"),
        ("knapsack", ["--contexts", "64;16"], "separated by commas"),
        ("skip-set", ["--share", 0.9], "choose between 1 and half"),
        ("skip-set", ["--tokens", 100000], "give more text"),
        ("skip-set", ["--device", "abacus"], "there is no abacus here"),
        ("knn", [], "at least two domains"),
        ("knn", ["--clusters", 3], "3 from 4 prompts: ask for at least 2, and give at least 6 prompts"),
        ("knn", ["single.jsonl"], "domain single has 1 prompt"),
        ("skip-set", ["bad.jsonl"], "bad.jsonl line 2"),
        ("skip-set", ["--out", "no/o.json"], "does not exist"),
    ],
)
def test_bad_input_ends_in_one_line(
    run: Callable, data: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, options: list,
    says: str,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    data("single", prompts=1)
    Path("bad.jsonl").write_text('{"prompt": "w1"}\n{"answer": "w1"}\n')
    said = run(command, data("one"), "--out", "o.json", *options, code=2)
    errors = [line for line in said.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and says in errors[0] and not Path("o.json").exists()
