"""Engine versions that have every name that freedraft hooks: reads the Python files of their wheels, installs nothing.

    python -m bench.versions vllm            # a table in Markdown
    python -m bench.versions sglang 0.5.22 0.5.23

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
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.util import resolve_name
from pathlib import Path
from typing import Any, NamedTuple

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
        "optional": ("OPTIONAL_HOOKS",),
    },
    "vllm": {
        "V1": ("CONFIG_HOOKS", "RUNNER_HOOKS"), "layer skipping": ("MODEL_HOOKS",), "V2": ("V2_HOOKS",),
        "V2, trees": ("V2_TREE_HOOKS",),
    },
}  # fmt: skip
"""Tables of hooks by the feature that needs them."""
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Found(NamedTuple):
    """A definition, and the module that contains it."""

    module: str
    node: Any


class Source:
    """Python files of a package, parsed without import. read: returns the text of a file by its path
    ("sglang/srt/server_args.py"), None if there is none; files: all paths."""

    def __init__(self, read: Callable[[str], str | None], files: Sequence[str]) -> None:
        self._read, self._files, self._module = read, files, cache(self._parse)

    def problem(self, hook: Hook) -> str | None:
        """See `Hook.problem`."""
        owner = self.resolve(hook.path)
        if owner is None:
            return f"{hook.path} is missing"
        found = self._member(owner, hook.attribute) if hook.attribute else owner
        if found is None:
            return f"{hook.name} is missing"
        if absent := sorted(set(hook.parameters) - self._parameters(found)) if hook.parameters else []:
            return f"{hook.name} takes no parameter {', '.join(absent)}"
        absent = sorted(set(hook.members) - self._names(found))
        return f"{hook.name} has no {', '.join(absent)}" if absent else None

    def resolve(self, path: str) -> Found | None:
        """Return the module, or the definition in a module, that a dotted path names."""
        parts = path.split(".")
        for depth in range(len(parts), 0, -1):
            name = ".".join(parts[:depth])
            tree = self._module(name)
            if tree is not None:
                found: Found | None = Found(name, tree)
                for part in parts[depth:]:
                    found = found and self._member(found, part)
                return found
        return None

    def _parse(self, name: str) -> ast.Module | None:
        path = name.replace(".", "/")
        text = self._read(f"{path}.py") or self._read(f"{path}/__init__.py")
        return None if text is None else ast.parse(text)

    def _member(self, owner: Found, name: str) -> Found | None:
        nodes = list(_definitions(owner.node))
        for node in nodes:
            overload = isinstance(node, Function) and any("overload" in ast.unparse(d) for d in node.decorator_list)
            if name in _defined(node) and not overload:
                return Found(owner.module, node)
        imports = ((node, alias) for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names)
        for node, alias in imports:
            if (alias.asname or alias.name) in (name, "*"):
                path = f"{self._imported(owner.module, node)}.{name if alias.name == '*' else alias.name}"
                if path != f"{owner.module}.{name}" and (found := self.resolve(path)) is not None:
                    return found
        return next((found for base in self._bases(owner) if (found := self._member(base, name))), None)

    def _imported(self, importer: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        is_package = self._read(f"{importer.replace('.', '/')}/__init__.py") is not None
        package = importer if is_package else importer.rpartition(".")[0]
        return resolve_name("." * node.level + (node.module or ""), package)

    def _bases(self, owner: Found) -> Iterator[Found]:
        for base in getattr(owner.node, "bases", ()):
            name = ast.unparse(base).split(".")[0].split("[")[0]
            found = self._member(Found(owner.module, self._module(owner.module)), name)
            if found is not None and isinstance(found.node, ast.ClassDef):
                yield found

    def _parameters(self, found: Found) -> set[str]:
        if isinstance(found.node, ast.ClassDef):
            made_by = self._member(found, "__init__")
            return self._names(found) if made_by is None else self._parameters(made_by)
        if not isinstance(found.node, Function):
            return set()
        arguments = found.node.args
        return {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}

    def _names(self, found: Found) -> set[str]:
        """Return the members of a class, and attributes that its methods assign to their first argument."""
        if not isinstance(found.node, ast.ClassDef):
            return set()
        names = {name for node in _definitions(found.node) for name in _defined(node)}
        names |= {n.attr for n in ast.walk(found.node) if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)}
        names |= {name for base in self._bases(found) for name in self._names(base)}
        folder = ASSEMBLED.get(f"{found.module}.{found.node.name}")
        for file in self._files if folder else ():
            if file.startswith(f"{folder}/") and file.endswith(".py"):
                nodes = ast.walk(ast.parse(self._read(file) or ""))
                names |= {name for node in nodes if isinstance(node, ast.AnnAssign) for name in _defined(node)}
        return names


def _definitions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield statements of a module or class, including those under a condition."""
    for child in getattr(node, "body", []):
        yield child
        if isinstance(child, ast.If | ast.Try | ast.With):
            yield from _definitions(child)
            for other in (*getattr(child, "handlers", []), *getattr(child, "orelse", [])):
                yield other
                yield from _definitions(other)


def _defined(node: ast.AST) -> set[str]:
    if isinstance(node, ast.ClassDef | Function):
        return {node.name}
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return {name.id for target in targets if target for name in ast.walk(target) if isinstance(name, ast.Name)}


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
    return Source(texts.get, list(texts))


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
