"""`picture`: what commands draw, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from freedraft.config import ConfigError


@contextmanager
def picture(path: Path, size: tuple[float, float], rows: int = 1, columns: int = 1) -> Iterator[tuple[Any, Any]]:
    """Give a figure of this size (inches) and its axes [rows, columns]; it is written at the end.

    Raises:
        ConfigError: matplotlib is missing, or the file cannot be written.
    """
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("--plot draws with matplotlib: pip install matplotlib") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    try:
        yield figure, axes
        figure.savefig(path, dpi=130)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}") from None
    finally:
        pyplot.close(figure)
