"""Selections decide which sublayers to skip while serving: static, SWIFT, KNN-SSD and KnapSpec."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from layerskip_plugin.selection.base import Evaluate, Selection, Static
from layerskip_plugin.skip_set import SkipSet

SELECTIONS = ("static", "swift", "knn", "knapsack")

__all__ = ["SELECTIONS", "Evaluate", "Selection", "Static", "make_selection"]


def make_selection(
    name: str,
    n_layers: int,
    model: str,
    sets: Mapping[str, SkipSet] | None = None,
    file: Path | None = None,
    evaluate: Evaluate | None = None,
    hardware: str | None = None,
) -> Selection:
    """Build the selection of that name for a model.

    Args:
        name: one of `SELECTIONS`.
        n_layers: decoder layers of the model that is served.
        model: its fingerprint.
        sets: the sets of static, by name; without any, nothing is skipped.
        file: what `freedraft calibrate` wrote: anchors for knn, a plan for knapsack.
        evaluate: scores sets for swift.
        hardware: in words; a plan with times of other hardware is refused.

    Raises:
        ValueError: an unknown name, something it needs is missing, or a file of another model or hardware; one line.
    """
    if name == "static":
        return Static(sets or {"": SkipSet.empty(n_layers, model)})
    if name == "swift":
        from layerskip_plugin.selection.swift import Swift

        if evaluate is None:
            raise ValueError("selection swift needs an engine that can score skip sets on its traffic")
        try:
            # They take seconds to import: now, not in the midst of serving.
            import bayes_opt.acquisition  # noqa: F401
            import sklearn.gaussian_process  # noqa: F401
        except ImportError as error:
            raise ValueError(f"selection swift needs {error.name}: pip install 'freedraft[calibrate]'") from None
        # The first and the last layer stay, as published: a start without them would be useless.
        return Swift(n_layers, evaluate, model, protected=(0, 1, 2 * n_layers - 2, 2 * n_layers - 1))
    if name not in SELECTIONS:
        raise ValueError(f"selection: there is none called {name!r}; choose from: {', '.join(SELECTIONS)}")
    if file is None:
        raise ValueError(
            f"selection {name} needs the option 'selection_file': make one with freedraft calibrate {name}"
        )
    if name == "knn":
        from layerskip_plugin.selection.knn import Domains, Knn

        return Knn(Domains.load(file, n_layers, model))
    from layerskip_plugin.selection.knapsack import Knapsack, Plan

    return Knapsack(Plan.load(file, n_layers, model, hardware))
