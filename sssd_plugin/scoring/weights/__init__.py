"""Weights of the learned scorer, and the files that ship with the package."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from freedraft.files import write_atomically

FEATURES = 31
BINS = 11
CONTEXT_SETS = 5 * BINS
"""One set of weights for each of 5 lengths of the longest matching store context x 11 bins of the request's: 0, 1, 2,
3, 4, 6, 8, 16, 32 tokens at least; up to 3 behind an edit of a copy, and of one edited before."""
VARIETIES = 7
SETS = CONTEXT_SETS + VARIETIES * VARIETIES
"""A second set, which is added, by how much the followers of either context differ (`learned.variety`)."""

EVIDENCES, RECYCLED_FEATURES = 6, 5
RECYCLED_SETS = 4 * EVIDENCES
"""Weights of recycled logits: a set for each of 4 orders they are found by x the longest matching context of n-grams, 0
to 5 tokens and more. Features: the logit by n-grams; whether the token is not among the likeliest; whether it is;
LIKELY + ln p; whether it is the first."""

_FORMAT = "freedraft-scorer-3"


@dataclass(frozen=True)
class Weights:
    """Weights of the learned scorer.

    Attributes:
        values: float64 [SETS, FEATURES].
        trained_on: what they were trained on, for people to read.
        trace_sha256: checksum of the trace, so that an evaluation can tell its own training data.
        recycled: float64 [RECYCLED_SETS, RECYCLED_FEATURES], of recycled logits.
    """

    values: NDArray[np.float64]
    trained_on: str = ""
    trace_sha256: str = ""
    recycled: NDArray[np.float64] = field(default_factory=lambda: initial_recycled_weights())

    def __post_init__(self) -> None:
        shapes = ((self.values, (SETS, FEATURES)), (self.recycled, (RECYCLED_SETS, RECYCLED_FEATURES)))
        for values, shape in shapes:
            if values.shape != shape or not np.isfinite(values).all():
                raise ValueError(f"scorer weights must be {shape[0]} x {shape[1]} finite numbers, not {values.shape}")

    @classmethod
    def load(cls, path: Path | None = None) -> Weights:
        """Read a weights file; without a path, the one that ships with the package. Raises ValueError: the file is
        missing or no weights file of this version."""
        source = files(__name__) / "default.json" if path is None else Path(path)
        try:
            data = json.loads(source.read_text())
            if data["format"] != _FORMAT:
                raise ValueError(f"format {data['format']!r}")
            values, recycled = (np.array(data[name], np.float64) for name in ("weights", "recycled"))
            return cls(values, str(data["trained_on"]), str(data["trace_sha256"]), recycled)
        except FileNotFoundError:
            raise ValueError(f"weights: {source} does not exist; train one with bench/scorer") from None
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise ValueError(
                f"weights: {source} is no scorer weights file of this version ({error}); train one with bench/scorer"
            ) from None

    def save(self, path: Path) -> None:
        head = {"format": _FORMAT, "trained_on": self.trained_on, "trace_sha256": self.trace_sha256}
        parts = [json.dumps(head)[:-1]]
        for name, values in (("weights", self.values), ("recycled", self.recycled)):
            rows = ",\n  ".join(json.dumps([float(f"{v:.6g}") for v in row]) for row in values)
            parts.append(f' "{name}": [\n  {rows}\n ]')
        write_atomically(path, (",\n".join(parts) + "}\n").encode(), mode=0o666)


def initial_recycled_weights() -> NDArray[np.float64]:
    """Return the weights that training starts from: half of either logit."""
    return np.tile([0.5, -1.0, 0.0, 0.5, 0.0], (RECYCLED_SETS, 1))
