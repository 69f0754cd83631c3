"""Which versions of SGLang have everything that we hook: their wheels' Python files are read, and nothing is installed.

    python -m bench.sglang_versions 0.5.22 0.5.23        # a table in Markdown

Wheels are downloaded with pip into --folder, and kept there. Nothing is run of them: a version that passes is one where
the table of hooks (`freedraft/engines/sglang/hooks.py`) would accept it, not one that was tested.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

from bench.lib.hooks_in_source import Source
from freedraft.engines.hooks import Hook
from freedraft.engines.sglang.hooks import CPU_HOOKS, HOOKS, MODEL_HOOKS, OPTIONAL_HOOKS, TESTED_VERSIONS

VERSIONS = ("0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23")
ASSEMBLED = {"sglang.srt.server_args.ServerArgs": "sglang.srt.arg_groups.fields"}
PARTS = {"`sssd`": HOOKS, "`layerskip`": MODEL_HOOKS, "CPU platform": CPU_HOOKS, "optional": OPTIONAL_HOOKS}


def wheel_of(version: str, folder: Path) -> Path:
    """Raises subprocess.CalledProcessError where pip finds no such wheel."""
    if not list(folder.glob(f"sglang-{version}-*.whl")):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, f"sglang=={version}", "-d", str(folder)], check=True)
    return next(folder.glob(f"sglang-{version}-*.whl"))


def missing(source: Source, hooks: Iterable[Hook]) -> list[str]:
    return [problem for hook in hooks if (problem := source.problem(hook)) is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("versions", nargs="*", default=VERSIONS)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "sglang-wheels")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    print(f"| SGLang | {' | '.join(PARTS)} | tests |\n|---|{'---|' * len(PARTS)}---|")
    failed = False
    for version in given.versions:
        source = Source.of_wheel(wheel_of(version, given.folder), ASSEMBLED)
        problems = [missing(source, hooks) for hooks in PARTS.values()]
        cells = ["; ".join(found).replace("sglang.srt.", "") or "all there" for found in problems]
        print(f"| {version} | {' | '.join(cells)} | {'run' if version in TESTED_VERSIONS else 'not run'} |")
        failed |= version in TESTED_VERSIONS and any(problems)
    return failed


if __name__ == "__main__":
    sys.exit(main())
