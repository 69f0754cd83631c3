"""Weights files of the learned scorer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from drafting import random_recycled_weights, random_weights

from sssd_plugin.drafter import Drafter
from sssd_plugin.scoring.weights import (
    FEATURES,
    RECYCLED_FEATURES,
    RECYCLED_SETS,
    SETS,
    Weights,
    initial_recycled_weights,
)


def test_round_trip(tmp_path: Path) -> None:
    values = random_weights(0)
    values[0, :3] = 1e-9, -123456.0, 0.0
    path = tmp_path / "weights.json"
    Weights(values, 'a trace called "x"', "0" * 64, random_recycled_weights(0)).save(path)
    loaded = Weights.load(path)
    assert loaded.values.dtype == np.float64
    assert loaded.values.tolist() == values.tolist()
    assert loaded.recycled.tolist() == random_recycled_weights(0).tolist()
    assert (loaded.trained_on, loaded.trace_sha256) == ('a trace called "x"', "0" * 64)
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == path.read_text()


def test_shipped_weights() -> None:
    shipped = Weights.load()
    assert shipped.values.shape == (SETS, FEATURES)
    assert shipped.values[:, 3:].any() and np.isfinite(shipped.values).all()
    assert not np.array_equal(shipped.recycled, initial_recycled_weights())
    assert shipped.trained_on and len(shipped.trace_sha256) == 64


GOOD = {
    "format": "freedraft-scorer-3",
    "trained_on": "x",
    "trace_sha256": "y",
    "weights": random_weights(0).tolist(),
    "recycled": initial_recycled_weights().tolist(),
}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "does not exist"),
        (b"", ""),
        (b"[1, 2]", ""),
        (b'"text"', ""),
        (b"\xff\xfe\x00\x80", ""),
        (GOOD | {"format": "freedraft-scorer-2"}, "freedraft-scorer-2"),
        (GOOD | {"weights": GOOD["weights"][:-1]}, f"{SETS} x {FEATURES}"),
        (GOOD | {"weights": [*GOOD["weights"][:-1], [1.0]]}, ""),
        (GOOD | {"weights": [["x"] * FEATURES] * SETS}, ""),
        (GOOD | {"weights": [[float("nan")] * FEATURES] * SETS}, "finite"),
        (GOOD | {"weights": [[1e400] * FEATURES] * SETS}, "finite"),
        (GOOD | {"weights": 3}, f"{SETS} x {FEATURES}"),
        (GOOD | {"recycled": GOOD["recycled"][1:]}, f"{RECYCLED_SETS} x {RECYCLED_FEATURES}"),
        *(({key: GOOD[key] for key in GOOD if key != gone}, gone) for gone in GOOD if gone != "trained_on"),
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
