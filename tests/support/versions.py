"""Engine versions that have every name that freedraft hooks: reads the Python files of their wheels, installs nothing.

    python -m tests.support.versions vllm            # a table in Markdown
    python -m tests.support.versions sglang 0.5.22 0.5.23

Wheels are downloaded with pip into --folder and kept there. Their code is not run: a version that passes is one that
the tables of hooks (`freedraft/engines/*/hooks.py`) would accept, not one that was tested.
"""

import argparse
import ast
import importlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any

import griffe

from bench.lib.tables import markdown
from freedraft.engines.hooks import Hook, is_tested

# The CPU wheel of a version, which is smaller, if it has one.
VERSIONS = {
    "sglang": ("0.5.18", "0.5.19", "0.5.20", "0.5.21", "0.5.22", "0.5.23"),
    "vllm": ("cpu==0.29.0", "cpu==0.30.0", "cpu==0.31.0", "cpu==0.32.0", "0.33.0"),
}
ASSEMBLED = {"sglang.srt.server_args.ServerArgs": "sglang/srt/arg_groups/fields"}
"""Classes assembled from the annotations of all classes in the files of a folder."""
TABLES: dict[str, dict[str, tuple[str, ...]]] = {
    "sglang": {
        "`sssd`": ("HOOKS",), "`layerskip`": ("MODEL_HOOKS",), "CPU platform": ("CPU_HOOKS",),
        "trees on FA3": ("FA3_HOOKS",), "optional": ("OPTIONAL_HOOKS",),
    },
    "vllm": {
        "V1": ("CONFIG_HOOKS", "RUNNER_HOOKS"), "layer skipping": ("MODEL_HOOKS",), "V2": ("V2_HOOKS",),
        "streams": ("STREAM_HOOKS",), "heads": ("HEAD_HOOKS",), "predictions": ("PREDICTION_HOOKS",),
    },
}  # fmt: skip
"""Tables of hooks by the feature that needs them."""


class Assigned(griffe.Extension):
    """Adds to a class what its methods assign to attributes; griffe itself reads only `__init__`."""

    def on_class_members(self, *, node: Any, cls: griffe.Class, **_: Any) -> None:
        for each in ast.walk(node):
            if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store):
                cls.members.setdefault(each.attr, griffe.Attribute(each.attr, parent=cls))


class Source(griffe.ModulesCollection):
    """Python files of a package, parsed without import when they are needed. texts: by path ("sglang/version.py")."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        super().__init__()
        self._texts = {f"{folder}/__init__.py": "" for path in texts for folder in Path(path).parents} | dict(texts)
        self._unread = {p.removesuffix(".py").removesuffix("/__init__").replace("/", "."): p for p in self._texts}

    def problem(self, hook: Hook) -> str | None:
        """See `Hook.problem`."""
        name = hook.name
        try:
            found = self.get_member(name)
            if found.is_attribute and found.labels <= {"instance-attribute"}:
                raise KeyError("not an attribute of the class itself")
            members = set(found.all_members)
        except (KeyError, griffe.GriffeError):
            return f"{name} is missing"
        if absent := sorted(set(hook.parameters) - ({p.name for p in getattr(found, "parameters", ())} or members)):
            return f"{name} takes no parameter {', '.join(absent)}"
        folder = ASSEMBLED.get(found.canonical_path)
        trees = [ast.parse(text) for path, text in self._texts.items() if folder and path.startswith(f"{folder}/")]
        nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.AnnAssign)]
        absent = sorted(set(hook.members).difference(members, (ast.unparse(node.target) for node in nodes)))
        return f"{name} has no {', '.join(absent)}" if absent else None

    def get_member(self, key: Any) -> Any:
        """Parse the modules on a dotted path first; griffe calls this for all paths of imports and base classes."""
        for module in accumulate(key.split("."), "{}.{}".format):
            if path := self._unread.pop(module, None):
                package, _, name = module.rpartition(".")
                parent, extensions = super().get_member(package) if package else None, griffe.Extensions(Assigned())
                options: dict[str, Any] = {"parent": parent, "modules_collection": self, "extensions": extensions}
                new = griffe.visit(name, Path(path), self._texts[path], **options)
                self.set_member(module, new)
                for star in filter(None, [getattr(each, "wildcard", None) for each in new.members.values()]):
                    with suppress(KeyError, griffe.GriffeError):
                        for each in self.get_member(star).members:
                            new.members.setdefault(each, griffe.Alias(each, f"{star}.{each}", parent=new))
        return super().get_member(key)


def parts(engine: str) -> dict[str, tuple[Hook, ...]]:
    hooks = importlib.import_module(f"freedraft.engines.{engine}.hooks")
    return {title: sum((getattr(hooks, name) for name in names), ()) for title, names in TABLES[engine].items()}


def source_of(engine: str, version: str, folder: Path) -> Source:
    """Raises subprocess.CalledProcessError: pip finds no such wheel."""
    package = f"{engine}-{version}" if version.startswith("cpu") else f"{engine}=={version}"
    pattern = package.replace("-", "_").replace("==", "-") + "-*.whl"
    if not list(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
        subprocess.run([*command, package, "-d", str(folder)], check=True)
    with zipfile.ZipFile(next(folder.glob(pattern))) as wheel:
        texts = {name: wheel.read(name).decode() for name in wheel.namelist() if name.endswith(".py")}
    return Source(texts)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=sorted(VERSIONS))
    parser.add_argument("versions", nargs="*")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "engine-wheels")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    tables, rows, failed = parts(given.engine), [], False
    tested: tuple[str, ...] = importlib.import_module(f"freedraft.engines.{given.engine}.hooks").TESTED_VERSIONS
    for version in given.versions or VERSIONS[given.engine]:
        source, number = source_of(given.engine, version, given.folder), version.removeprefix("cpu==")
        problems = ["; ".join(filter(None, map(source.problem, hooks))) for hooks in tables.values()]
        cells = [found.replace("sglang.srt.", "").replace("vllm.v1.", "") or "all there" for found in problems]
        ran = is_tested(number, tested)
        rows.append([number, *cells, "run" if ran else "not run"])
        failed |= ran and any(problems)
    print(markdown(["version", *tables, "tests"], rows))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
