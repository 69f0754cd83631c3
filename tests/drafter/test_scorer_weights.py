"""Weights files of the learned scorer."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from drafting import random_weights

from bench.scorer.weights import save
from freedraft.cost.acceptance import PASS_KINDS
from sssd_plugin.drafter import Drafter
from sssd_plugin.scoring.inputs import INPUTS, NODE_INPUTS, NODE_KINDS, ROWS
from sssd_plugin.scoring.matches import MAX_MATCH
from sssd_plugin.scoring.places import ROWS as COPY_ROWS
from sssd_plugin.scoring.weights import WIDTH, Weights


def test_round_trip(tmp_path: Path) -> None:
    weights = replace(random_weights(0), trained_on={'a trace called "x"': "0" * 64}, recipe="python -m bench.scorer")
    weights.layer[0, :3] = 1e-9, -123450.0, 0.0
    path = tmp_path / "weights.json"
    save(weights, path)
    loaded = Weights.load(path)
    assert loaded.layer.dtype == loaded.out.dtype == np.float32
    assert loaded.copies.tolist() == weights.copies.tolist()
    assert loaded.layer.tolist() == weights.layer.tolist() and loaded.out.tolist() == weights.out.tolist()
    assert (loaded.trained_on, loaded.recipe) == (weights.trained_on, weights.recipe)
    save(loaded, tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == path.read_text()


def test_shipped_weights() -> None:
    shipped = Weights.load()
    assert shipped.layer.shape == (ROWS, WIDTH) == (1 + NODE_INPUTS + 2 * INPUTS, WIDTH)
    assert 2 * NODE_KINDS <= PASS_KINDS, "kinds of n-grams are not those of draft passes"
    assert shipped.out.all() and (shipped.layer != 0).mean() > 0.9
    assert "bench.scorer" in shipped.recipe and len(shipped.trained_on) >= 2
    assert all(len(digest) == 64 for digest in shipped.trained_on.values())


GOOD = {"format": "freedraft-scorer-5", "trained_on": {"x": "y"}, "recipe": "z"}
GOOD |= {"layer": random_weights(0).layer.tolist(), "out": random_weights(0).out.tolist()}
GOOD |= {"copies": random_weights(0).copies.tolist()}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "does not exist"),
        (b"", ""),
        (b"\xff\xfe\x00\x80", ""),
        (GOOD | {"format": "freedraft-scorer-4"}, "freedraft-scorer-4"),
        (GOOD | {"layer": GOOD["layer"][:-1]}, f"({ROWS}, {WIDTH})"),
        (GOOD | {"layer": [["x"] * WIDTH] * ROWS}, ""),
        (GOOD | {"layer": [[float("nan")] * WIDTH] * ROWS}, "finite"),
        (GOOD | {"layer": [[1e300] * WIDTH] * ROWS}, "finite"),
        (GOOD | {"layer": 3}, f"({ROWS}, {WIDTH})"),
        (GOOD | {"copies": GOOD["copies"][1:]}, f"({COPY_ROWS}, {MAX_MATCH + 1})"),
        (GOOD | {"copies": [[1.0] * (MAX_MATCH + 1)] * COPY_ROWS}, "below 1"),
        (GOOD | {"copies": [[float("nan")] * (MAX_MATCH + 1)] * COPY_ROWS}, "finite"),
        (GOOD | {"out": GOOD["out"][1:]}, f"({WIDTH - 1},)"),
        *(({key: GOOD[key] for key in GOOD if key != gone}, gone) for gone in GOOD),
    ],
)
def test_malformed_or_missing(tmp_path: Path, content: bytes | dict | None, reason: str) -> None:
    """One line names the file and the remedy."""
    path = tmp_path / "weights.json"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(ValueError, match=f"^weights: {path} .*train one with bench/scorer") as raised:
        Drafter(vocab_size=10, max_nodes=4, weights=path)
    assert reason in str(raised.value) and "\n" not in str(raised.value)


def test_paper_scoring_needs_no_weights(tmp_path: Path) -> None:
    Drafter(vocab_size=10, max_nodes=4, scoring="paper", weights=tmp_path / "none.json")
