"""What calibration in an engine must do: what transformers says of the same tokens, and files that engines load."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from typer.testing import CliRunner

from freedraft.cli import app
from layerskip_plugin.calibrate import pass_times
from layerskip_plugin.calibrate import run as calibrate_run
from layerskip_plugin.calibrate.host_model import HostModel
from layerskip_plugin.calibrate.knapsack import search
from layerskip_plugin.calibrate.model import CalibrationModel
from layerskip_plugin.calibrate.sample import Sample
from layerskip_plugin.selection.knapsack import Plan
from layerskip_plugin.selection.knn import Domains
from layerskip_plugin.skip_set import SkipSet
from tests.support import prompts

TEXTS, TOKENS, CONTEXT = 3, 24, 520
ROUNDS = 5  # of timing, which nothing here is judged by but their order


@contextmanager
def quick_timing() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pass_times, "ROUNDS", ROUNDS)
        yield


def read_by_both(model: CalibrationModel, host: HostModel, folder: Path) -> tuple[Sample, Sample]:
    """The same tokens of the engine's own answers."""
    asked = prompts.chat_and_raw_ids(folder)[:TEXTS]
    answers = model.generate(asked, 16)
    assert [len(answer) for answer in answers] == [16] * TEXTS
    texts = [prompt + answer for prompt, answer in zip(asked, answers, strict=True)]
    first = [len(prompt) for prompt in asked]
    ours, theirs = (Sample.spread(each, texts, TOKENS, first, seed=1) for each in (model, host))
    assert torch.equal(ours.gather(lambda t: t.best), theirs.gather(lambda t: t.best))
    return ours, theirs


def check_scores(model: CalibrationModel, host: HostModel, samples: tuple[Sample, Sample], rows: int) -> None:
    """Those of the reference, also across several passes of so many rows."""
    rng = np.random.default_rng(0)
    sets = [model.empty(), model.skip([0, 7])]
    sets += [model.skip(rng.choice(np.arange(2, 58), size, replace=False).tolist()) for size in (3, 5, 8, 8, 12, 12)]
    assert len(sets) * TOKENS > 2 * rows
    agreement, cosine = model.scores(sets, samples[0])
    expected, expected_cosine = host.scores(sets, samples[1])
    assert agreement[0] == 1 and 0.2 < agreement[2:].min() < 0.95
    assert agreement == pytest.approx(expected, abs=1.01 / TOKENS)
    assert cosine == pytest.approx(expected_cosine, abs=1e-3)
    assert spearmanr(agreement, expected).statistic >= 0.9


def check_search(model: CalibrationModel, host: HostModel, samples: tuple[Sample, Sample], max_weight: int = 6) -> None:
    ours, theirs = (
        search(each, sample, max_weight=max_weight) for each, sample in zip((model, host), samples, strict=True)
    )
    assert [each.weight for each in ours] == [each.weight for each in theirs] == list(range(max_weight + 1))
    assert [each.skip for each in ours] == [each.skip for each in theirs]


def check_times(model: CalibrationModel) -> None:
    times = model.pass_times(500)
    assert times.attention > 0 and times.mlp > 0 and times.verify(1) < times.verify(12)
    assert times.draft(model.skip(range(0, 60, 2))) < times.draft(model.empty())


def check_commands(
    engine: str,
    model: CalibrationModel,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: Sequence[str] = ("skip-set", "bayesian", "knapsack", "knn"),
) -> None:
    """With `model` in place of one that they would start."""
    monkeypatch.setattr(calibrate_run, "load_model", lambda folder, settings: model)
    monkeypatch.setattr(calibrate_run, "ANSWER_TOKENS", 16)
    monkeypatch.setattr(calibrate_run, "TIMED_CONTEXT", 128)
    monkeypatch.setattr(type(model), "close", lambda self: None)
    files = [tmp_path / f"{name}.jsonl" for name in ("animals", "poems")]
    asked = (("Tell me of cats.", "Tell me of dogs."), ("Write a poem on rain.", "Write a poem on snow."))
    for file, of_domain in zip(files, asked, strict=True):
        file.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in of_domain))

    def calibrate(name: str, *options: object) -> Path:
        out = tmp_path / f"{name}.json"
        few = ("--tokens", 24, "--engine", engine, "--model", folder, "--out", out)
        done = CliRunner().invoke(app, ["calibrate", name, *map(str, (*files, *few, *options))])
        assert done.exit_code == 0, done.output
        assert json.loads(out.read_text())["about"]["engine"] == engine
        return out

    known = model.n_layers, model.fingerprint
    if "skip-set" in names:
        assert len(SkipSet.load(calibrate("skip-set", "--share", 0.05, "--survivors", 1), *known)) == 3
    if "bayesian" in names:
        assert len(SkipSet.load(calibrate("bayesian", "--share", 0.05, "--iterations", 4), *known)) == 3
    if "knapsack" in names:
        assert Plan.load(calibrate("knapsack", "--contexts", "128"), *known).contexts == (128,)
    if "knn" in names:
        assert Domains.load(calibrate("knn", "--share", 0.05, "--survivors", 1), *known).names == ("animals", "poems")
