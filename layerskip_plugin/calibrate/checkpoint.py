"""Checkpoints of long calibrations: the same command goes on where it was interrupted."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from layerskip_plugin.skip_set import read_json, write_json

FORMAT = "freedraft calibration in progress 1"


class Checkpoint:
    """Results of finished steps, in a file beside the one that will be written.

    Args:
        out: what the calibration writes at the end.
        settings: everything that the steps depend on; results under other settings are thrown away.

    Raises:
        ValueError: `out`'s folder does not exist.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any]) -> None:
        if not out.parent.is_dir():
            raise ValueError(f"out: folder {out.parent} does not exist")
        self.path = out.with_name(out.name + ".progress")
        self.settings = hashlib.sha256(json.dumps(settings, sort_keys=True, default=str).encode()).hexdigest()[:16]
        self.steps: dict[str, Any] = {}
        # Without a file, or with one that cannot be read, it begins anew.
        with suppress(ValueError):
            saved = read_json(self.path, FORMAT, "calibration")
            if saved.get("settings") == self.settings:
                self.steps = saved["steps"]

    def step(self, name: str, compute: Callable[[], Any]) -> Any:
        """The result of a step, computed now if it is not saved yet; it must be JSON."""
        if name not in self.steps:
            self.put(name, compute())
        return self.steps[name]

    def put(self, name: str, result: Any) -> None:
        """Save a result."""
        self.steps[name] = result
        write_json(self.path, {"format": FORMAT, "settings": self.settings, "steps": self.steps})

    def remove(self) -> None:
        """Delete the file once the calibration's result is written."""
        self.path.unlink(missing_ok=True)
