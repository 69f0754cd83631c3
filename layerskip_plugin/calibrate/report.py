"""A look at the skip sets in any file that a calibration wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from freedraft.plotting import picture
from layerskip_plugin.selection import knapsack, knn
from layerskip_plugin.skip_set import FORMAT as SKIP_SET
from layerskip_plugin.skip_set import SkipSet

COLORS = {"retained": "#dddddd", "attention skipped": "#c0392b", "MLP skipped": "#2471a3"}


def load_sets(file: Path) -> tuple[dict[str, SkipSet], dict[str, Any]]:
    """The sets in a calibration's file by name, and the file's "about".

    Raises:
        ValueError: no such file, or not one of these.
    """
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
        form, about = values["format"], dict(values["about"])
    except OSError as error:
        raise ValueError(f"cannot read {file}: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"{file} is no file of freedraft calibrate") from None
    if form == SKIP_SET:
        return {file.stem: SkipSet.load(file)}, about
    if form == knn.FORMAT:
        domains = knn.Domains.load(file)
        return dict(zip([*domains.names, knn.ALL_DOMAINS], domains.sets, strict=True)), about
    if form == knapsack.FORMAT:
        plan = knapsack.Plan.load(file)
        pairs = zip(plan.contexts, plan.choices, strict=True)
        return {f"context {c}, draft {x.length}": x.skip for c, x in pairs}, about | {"hardware": plan.hardware}
    raise ValueError(f"{file} holds {form!r}: there are no skip sets in it")


def draw(sets: dict[str, SkipSet], path: Path) -> None:
    """Draw a strip of two rows per set, layer by layer: retained, skipped attention, skipped MLP.

    Raises:
        ConfigError: matplotlib is missing, or the picture cannot be written.
    """
    import numpy as np
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    layers = max(skip.n_layers for skip in sets.values())
    size = (2 + 0.25 * layers, 0.6 + 0.9 * len(sets))
    with picture(path, size, rows=len(sets)) as (figure, axes):
        for (name, skip), axis in zip(sets.items(), axes[:, 0], strict=True):
            cells = np.array(skip.bits).reshape(-1, 2).T * np.array([[1], [2]])
            axis.imshow(cells, cmap=ListedColormap(list(COLORS.values())), vmin=0, vmax=2, aspect="auto")
            axis.set_yticks([0, 1], ["attention", "MLP"])
            axis.set_xticks(range(0, skip.n_layers, 5))
            axis.set_xticks(np.arange(skip.n_layers) - 0.5, minor=True)
            axis.set_yticks([0.5], minor=True)
            axis.grid(which="minor", color="white", linewidth=1)
            axis.tick_params(which="both", length=0)
            axis.set_title(f"{name}: {len(skip)} of {2 * skip.n_layers} skipped", loc="left", fontsize=9)
        axes[-1, 0].set_xlabel("layer")
        patches = [Patch(color=color, label=name) for name, color in COLORS.items()]
        figure.legend(handles=patches, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
