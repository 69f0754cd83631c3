"""A look at the skip sets in any file that a calibration wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from layerskip_plugin.selection import knapsack, knn
from layerskip_plugin.skip_set import FORMAT as SKIP_SET
from layerskip_plugin.skip_set import SkipSet


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
