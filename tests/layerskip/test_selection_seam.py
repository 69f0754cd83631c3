"""What engines ask for: a selection by name, and the time that a search may take."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from layerskip_plugin.selection import SELECTIONS, make_selection
from layerskip_plugin.selection.knapsack import Choice, Plan
from layerskip_plugin.selection.knn import Domains
from layerskip_plugin.selection.time_budget import TimeBudget
from layerskip_plugin.skip_set import SkipSet


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    skip = SkipSet.of_sublayers([2], 4, "m")
    paths = {name: tmp_path / f"{name}.json" for name in ("knn", "knapsack")}
    Plan((10,), (Choice(skip, 3, 1.0),), "here").save(paths["knapsack"], {})
    anchors = np.eye(2, 6, dtype=np.float32)
    Domains(("a", "b"), (skip,) * 3, np.zeros(6, np.float32), anchors, np.array([0, 1], np.int32), 0.5).save(
        paths["knn"], {}
    )
    return paths


def test_every_selection_by_name(files: dict[str, Path]) -> None:
    for name in SELECTIONS:
        file = files.get(name)
        given = {"one": SkipSet.of_sublayers([2], 4, "m")} if name == "static" else None
        made = make_selection(name, 4, "m", given, file, lambda skips: np.zeros(len(skips)), "here")
        assert type(made).__name__.lower() == name
        assert all(skip.n_layers == 4 and skip.model == "m" for skip in made.sets().values())
        assert made.choose(["r"], np.array([5], np.int32))[0] < len(made.sets())
    assert [len(skip) for skip in make_selection("static", 4, "m").sets().values()] == [0]


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("statik", "knn", "none called 'statik'; choose from: static, swift, knn, knapsack"),
        ("swift", None, "needs an engine"),
        ("knn", None, "freedraft calibrate knn"),
        ("knn", "knapsack", "has the format 'freedraft knapsack plan 1'"),
        ("knapsack", "knapsack", "measured on here, this is there"),
    ],
)
def test_what_cannot_be_used_is_refused(files: dict[str, Path], name: str, given: str | None, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make_selection(name, 4, "m", None, files[given] if given else None, hardware="there")


@pytest.mark.parametrize("name", ["knn", "knapsack"])
def test_files_of_another_model_are_refused(files: dict[str, Path], name: str) -> None:
    with pytest.raises(ValueError, match="another model"):
        make_selection(name, 4, "other", None, files[name])
    with pytest.raises(ValueError, match="4 layers, this one has 5"):
        make_selection(name, 5, "m", None, files[name])


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
    with pytest.raises(ValueError, match="share"):
        TimeBudget(1.5)
