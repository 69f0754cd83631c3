"""Hooked names of an engine, as data: one table per engine, checked before registration; the line that logs or ends a
start."""

import importlib
import inspect
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import TracebackType
from typing import Any, NoReturn

from freedraft.config import ConfigError


@dataclass(frozen=True, slots=True)
class Hook:
    """A name of an engine that freedraft calls, wraps or reads."""

    name: str  # dotted path of a module, or of what is in it
    parameters: tuple[str, ...] = ()  # parameters that the function must take
    # Attributes: of the class, annotated, or assigned to `self` by its methods or those of its bases.
    members: tuple[str, ...] = ()
    purpose: str = ""  # feature that needs it; shown to the user

    def problem(self) -> str | None:
        """The missing part, in a few words; None if the hook is complete."""
        try:
            found = resolve(self.name)
        except AttributeError as error:
            return f"{error} is missing"
        except Exception as error:  # an engine's module may raise anything on an unsupported machine
            return f"{self.name} cannot be imported ({(str(error) or repr(error)).splitlines()[0]})"
        if absent := sorted(set(self.parameters) - _parameters(found)) if self.parameters else []:
            return f"{self.name} takes no parameter {', '.join(absent)}"
        absent = [name for name in self.members if not _has(found, name)]
        return f"{self.name} has no {', '.join(absent)}" if absent else None


_LINE = re.compile(r"([\w.]+)(?:\((.*)\))?(?: has (.*))?")


def table(text: str) -> tuple[Hook, ...]:
    """Parse hooks, one per line below their common `# purpose`: a dotted path, optionally with `(parameter, ...)` and
    ` has name, ...`. An indented line continues the previous one."""
    purpose, found = "", []
    for line in re.sub(r"\n\s+(?=\S)", " ", inspect.cleandoc(text)).splitlines():
        if line.startswith("# "):
            purpose = line[2:]
            continue
        match = _LINE.fullmatch(line)
        assert match is not None, line
        name, *lists = match.groups("")
        parameters, members = (tuple(text.split(", ")) if text else () for text in lists)
        found.append(Hook(name, parameters, members, purpose))
    return tuple(found)


def resolve(path: str) -> Any:
    """The module, or the attribute chain inside a module, at a dotted path. Raises ImportError: a module of the path is
    missing or fails to import; AttributeError: the module has no such attribute."""
    parts = path.split(".")
    found = importlib.import_module(parts[0])
    for depth, part in enumerate(parts[1:], start=2):
        if hasattr(found, part):
            found = getattr(found, part)
            continue
        name = ".".join(parts[:depth])
        if not inspect.ismodule(found):
            raise AttributeError(name)
        try:
            found = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise
            raise AttributeError(name) from None
    return found


def check(hooks: Iterable[Hook]) -> list[str]:
    """Problems of `hooks`, one line each; empty if all are complete."""
    return [problem for hook in hooks if (problem := hook.problem())]


def _parameters(function: Any) -> set[str]:
    try:
        # unwrap: compare the engine's own signature, not another plugin's wrapper.
        return set(inspect.signature(inspect.unwrap(function)).parameters)
    except (TypeError, ValueError):
        return set()


def _has(owner: Any, name: str) -> bool:
    bases = getattr(owner, "__mro__", (owner,))
    if hasattr(owner, name) or any(name in getattr(base, "__annotations__", {}) for base in bases):
        return True
    members = (member for base in bases for member in vars(base).values())
    codes = (getattr(inspect.unwrap(member), "__code__", None) for member in members if callable(member))
    return any(name in code.co_names for code in codes if code is not None)


def is_tested(version: str, tested: Sequence[str]) -> bool:
    """Whether a version is one of `tested`, ignoring local parts and further components."""
    return any(version.split("+")[0] == each or version.startswith(f"{each}.") for each in tested)


def installed_version(distributions: Iterable[str]) -> str:
    """The version of the first installed one of these distributions; "?" without any."""
    for name in distributions:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "?"


def start_line(
    method: str, engine: str, version: str, tested: Sequence[str], parts: Sequence[str], ranks: Mapping[str, int],
    lengths: Sequence[str],
) -> str:  # fmt: skip
    """Return the line. tested: tested versions; parts: runner, scheduling, graphs, attention; ranks: numbers by kind of
    parallelism; lengths: text on the number of draft tokens."""
    untested = "" if is_tested(version, tested) else f" (untested; tested: {', '.join(tested)})"
    several = [f"{size} {kind}-parallel ranks" for kind, size in ranks.items() if size > 1]
    return f"freedraft: method '{method}': " + "; ".join([f"{engine} {version}{untested}", *parts, *several, *lengths])


def stop_start(error: ConfigError) -> NoReturn:
    """Stop the start of the engine; an uncaught error is printed as its one line, without a traceback."""
    if not hasattr(sys.excepthook, "_freedraft"):
        previous = sys.excepthook

        def excepthook(kind: type[BaseException], value: BaseException, trace: TracebackType | None) -> Any:
            if isinstance(value, ConfigError):
                print(f"freedraft: {value}", file=sys.stderr)
            else:
                previous(kind, value, trace)

        excepthook._freedraft = True  # type: ignore[attr-defined]
        sys.excepthook = excepthook
    raise error
