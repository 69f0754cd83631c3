"""`freedraft doctor`: the installed engines, and hooked names that they lack."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec

from rich.console import Console

from freedraft import __version__
from freedraft.config import ConfigError
from freedraft.cost.hardware import HardwareProfile, device_name
from freedraft.engines.hooks import Hook, check, installed_version, is_tested

ENGINES = ("vllm", "sglang")


@dataclass(frozen=True, slots=True)
class EngineReport:
    """The state of one engine. Problems and notes are one line each."""

    engine: str
    version: str | None = None  # if it is installed
    hooks: int = 0  # number of hooks that are there, where there are no problems: of all methods if all can draft
    problems: tuple[str, ...] = ()  # drafting is disabled until they are fixed
    notes: tuple[str, ...] = ()  # missing optional parts, settings that decide the speed, untested versions

    @property
    def usable(self) -> bool:
        return self.version is not None and not self.problems


def examine(engine: str) -> EngineReport:
    """Look for an engine and everything in `freedraft.engines.<engine>.hooks`."""
    if find_spec(engine) is None:
        return EngineReport(engine)
    try:
        table = importlib.import_module(f"freedraft.engines.{engine}.hooks")
    except Exception as error:  # an incomplete installation may raise anything
        return EngineReport(engine, "?", problems=(f"{error!r}: reinstall {engine}",))
    for_model: Sequence[Hook] = getattr(table, "MODEL_HOOKS", ())
    problems, of_model, notes = check(table.HOOKS), check(for_model), []
    if not any(point.value.startswith("sssd_plugin.") for point in entry_points(group=table.ENTRY_POINT_GROUP)):
        problems.append(f"no entry point of freedraft in group '{table.ENTRY_POINT_GROUP}': reinstall freedraft")
    if of_model:
        notes.append(f"'sssd' can draft, 'layerskip' and 'hybrid' cannot: {'; '.join(of_model)}")
    optional: Sequence[Hook] = getattr(table, "OPTIONAL_HOOKS", ())
    notes += [f"{problem}: no {hook.purpose}" for hook in optional if (problem := hook.problem())]
    found, tested = installed_version(table.DISTRIBUTIONS), getattr(table, "TESTED_VERSIONS", ())
    if tested and not is_tested(found, tested):
        notes.append(f"untested version; tested: {', '.join(tested)}")
    if not problems and hasattr(table, "settings"):
        notes += table.settings()
    there = len(table.HOOKS) + (0 if of_model else len(for_model))
    return EngineReport(engine, found, there, tuple(problems), tuple(notes))


def run(console: Console | None = None) -> int:
    """Print the reports; return 0 if at least one engine is installed and none lacks a hook, else 1."""
    console = console or Console(highlight=False, soft_wrap=True)
    console.print(f"freedraft {__version__}")
    reports = [examine(engine) for engine in ENGINES]
    for report in reports:
        name = f"  {report.engine} {report.version}"
        if report.version is None:
            console.print(f"  {report.engine}: not installed")
        elif report.usable:
            console.print(f"{name}: all {report.hooks} hooks are there", style="green")
            for note in report.notes:
                console.print(f"    - {note}", markup=False)
        else:
            console.print(f"{name}: freedraft cannot draft here", style="red")
            for problem in report.problems:
                console.print(f"    - {problem}", style="red", markup=False)
            console.print("    The engine runs without freedraft. Install a version of it that docs/versions.md names.")
    complete = all(report.usable for report in reports if report.version is not None)
    try:
        profile = HardwareProfile.detect()
        console.print(
            f"  hardware: {device_name() or 'CPU'}, profile '{profile.name}' ({profile.source}): "
            f"{profile.ridge} query tokens per step are about free"
        )
    except ConfigError as error:
        console.print(f"  hardware: {error}", style="red", markup=False)
        complete = False
    if all(report.version is None for report in reports):
        remedy = "in the clone of freedraft, pip install '.[vllm]' or pip install '.[sglang]'"
        console.print(f"Install an engine: {remedy}", markup=False)
        complete = False
    return 0 if complete else 1
