"""What engines ask for: a selection by name, and the time that a search may take."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest

from layerskip_plugin.options import LayerSkipOptions, SelectionName
from layerskip_plugin.selection.base import Selection
from layerskip_plugin.selection.knapsack import Choice, Plan
from layerskip_plugin.selection.knn import Domains
from layerskip_plugin.selection.serving import TimeBudget
from layerskip_plugin.skip_set import SkipSet, model_fingerprint

SIZES = {"model_type": "llama", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 4,
         "num_attention_heads": 2, "vocab_size": 8}  # fmt: skip
MODEL = model_fingerprint(SIZES)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    skip = SkipSet.of_sublayers([2], 4, MODEL)
    paths = {name: tmp_path / f"{name}.json" for name in ("knn", "knapsack")}
    Plan((10,), (Choice(skip, 3, 1.0),), "here").save(paths["knapsack"], {})
    anchors = np.eye(2, 6, dtype=np.float32)
    Domains(("a", "b"), (skip,) * 3, np.zeros(6, np.float32), anchors, np.array([0, 1], np.int32), 0.5).save(
        paths["knn"], {}
    )
    return paths


def select(name: str, file: Path | None, hardware: str = "here", **sizes: int) -> Selection:
    options = LayerSkipOptions.parse({"selection": name, "selection_file": file})
    config = SimpleNamespace(**SIZES | sizes)
    return options.make_selector(config, lambda skips: np.zeros(len(skips)), hardware).selection


def test_every_selection_by_name(files: dict[str, Path]) -> None:
    for name in get_args(SelectionName):
        made = select(name, files.get(name))
        assert type(made).__name__.lower() == name
        assert all(skip.n_layers == 4 and skip.model == MODEL for skip in made.sets().values())
        assert made.choose(["r"], np.array([5], np.int32))[0] in made.sets().values()
    assert [len(skip) for skip in select("static", None).sets().values()] == [0]


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("statik", "knn", "'static', 'swift', 'knn' or 'knapsack'"),
        ("knn", None, "freedraft calibrate knn"),
        ("knn", "knapsack", "has the format 'freedraft knapsack plan 1'"),
        ("knapsack", "knapsack", "measured on here, this is there"),
    ],
)
def test_what_cannot_be_used_is_refused(files: dict[str, Path], name: str, given: str | None, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        select(name, files[given] if given else None, "there")


@pytest.mark.parametrize("name", ["knn", "knapsack"])
def test_files_of_another_model_are_refused(files: dict[str, Path], name: str) -> None:
    with pytest.raises(ValueError, match="another model"):
        select(name, files[name], hidden_size=16)
    with pytest.raises(ValueError, match="4 layers, this one has 5"):
        select(name, files[name], num_hidden_layers=5)


def test_time_budget_is_a_share_of_the_time_whatever_a_search_takes() -> None:
    now = [0.0]
    rng = np.random.default_rng(0)
    budget, spent = TimeBudget(0.01, max_saved=0.5, clock=lambda: now[0]), 0.0
    for _ in range(5000):
        now[0] += float(rng.uniform(0.01, 0.1))
        if budget.seconds > 0:
            with budget.spending() as seconds:
                took = seconds * float(rng.uniform(0.5, 3))
                now[0] += took
                spent += took
    assert 0.009 * now[0] < spent < 0.0105 * now[0]
    now[0] += 10_000
    assert budget.seconds == 0.5
