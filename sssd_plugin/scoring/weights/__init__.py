"""Weights of the learned scorer; `bench/scorer` writes the shipped file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sssd_plugin.scoring.inputs import ROWS
from sssd_plugin.scoring.matches import MAX_MATCH
from sssd_plugin.scoring.places import ROWS as COPY_ROWS

WIDTH = 32
"""Units of the hidden layer. The last one is linear, the others are rectified."""

FORMAT = "freedraft-scorer-5"


@dataclass(frozen=True)
class Weights:
    """Weights of the learned scorer.

    Attributes:
        layer: float32 [ROWS, WIDTH]; out: float32 [WIDTH], output weights of the units.
        copies: float32 [COPY_ROWS, MAX_MATCH + 1], shares of copies that go on, see `places`.
        trained_on: sha256 of each training file, by its name.
        recipe: the command that trained them.
    """

    layer: NDArray[np.float32]
    out: NDArray[np.float32]
    copies: NDArray[np.float32]
    trained_on: dict[str, str] = field(default_factory=dict)
    recipe: str = ""

    def __post_init__(self) -> None:
        table = COPY_ROWS, MAX_MATCH + 1
        for values, shape in ((self.layer, (ROWS, WIDTH)), (self.out, (WIDTH,)), (self.copies, table)):
            if values.dtype != np.float32 or values.shape != shape or not np.isfinite(values).all():
                raise ValueError(f"scorer weights must be {shape} finite float32 numbers, not {values.shape}")
        if not ((self.copies >= 0) & (self.copies < 1)).all():
            raise ValueError("shares of copies must be at least 0 and below 1")

    @classmethod
    def load(cls, path: Path | None = None) -> Weights:
        """Read a weights file, by default the shipped one. Raises ValueError: the file is missing or no weights file of
        this version."""
        source = files(__name__) / "default.json" if path is None else Path(path)
        try:
            data = json.loads(source.read_text())
            if data["format"] != FORMAT:
                raise ValueError(f"format {data['format']!r}")
            layer, out, copies = (np.array(data[name], np.float32) for name in ("layer", "out", "copies"))
            return cls(layer, out, copies, dict(data["trained_on"]), str(data["recipe"]))
        except FileNotFoundError:
            raise ValueError(f"weights: {source} does not exist; train one with bench/scorer") from None
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise ValueError(
                f"weights: {source} is not a scorer of this version ({error}); train one with bench/scorer"
            ) from None
