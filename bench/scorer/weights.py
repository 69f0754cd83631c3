"""Weights of the learned scorer for training: the initial ones, and the file with the result."""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from freedraft.files import write_atomically
from sssd_plugin.scoring.inputs import CANDIDATE, ROW, ROWS
from sssd_plugin.scoring.matches import MAX_MATCH
from sssd_plugin.scoring.places import ROWS as COPY_ROWS
from sssd_plugin.scoring.weights import FORMAT, WIDTH, Weights


def initial_weights() -> Weights:
    """Return the initial weights: a mix of both interpolated probabilities, in the linear unit."""
    layer = np.zeros((ROWS, WIDTH), np.float32)
    layer[[ROW.bias, ROW.candidate + CANDIDATE.store, ROW.candidate + CANDIDATE.request], -1] = 1.0, 0.4, 0.5
    out, copies = np.append(np.zeros(WIDTH - 1, np.float32), np.float32(1.0)), np.zeros((COPY_ROWS, MAX_MATCH + 1))
    return Weights(layer, out, copies.astype(np.float32))


def save(weights: Weights, path: Path) -> None:
    """Write weights, rounded to five digits."""
    head = {"format": FORMAT, "trained_on": weights.trained_on, "recipe": weights.recipe, "out": _rounded(weights.out)}
    head["copies"] = [_rounded(row) for row in weights.copies]
    rows = ",\n  ".join(json.dumps(_rounded(row)) for row in weights.layer)
    write_atomically(path, f'{json.dumps(head)[:-1]},\n "layer": [\n  {rows}\n ]}}\n'.encode(), mode=0o666)


def _rounded(values: NDArray[np.float32]) -> list[float]:
    return [float(f"{v:.5g}") for v in values]
