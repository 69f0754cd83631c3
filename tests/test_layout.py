"""The rules of the house: what may import what, and what may stand in the tree."""

import ast
import graphlib
import json
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ENGINES = ("vllm", "sglang", "sgl_kernel")
PLUGINS = tuple(p.name for p in (ROOT / "sssd_plugin", ROOT / "layerskip_plugin") if p.is_dir())
SOURCE_ROOTS = {"freedraft": ROOT, "freedraft_kernels": ROOT / "kernels", **dict.fromkeys(PLUGINS, ROOT)}

IMPORT_WITHOUT = """
import importlib, json, sys
sys.modules.update(dict.fromkeys({blocked!r}))  # as if they were not installed
for name in {names!r}:
    importlib.import_module(name)
print(json.dumps([m for m, there in sys.modules.items() if there and m.partition(".")[0] in {heavy!r}]))
"""


def modules(package: str) -> dict[str, Path]:
    """Dotted name of each module of a package."""
    root = SOURCE_ROOTS[package]
    found = {}
    for path in sorted((root / package).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = {name: path for package in SOURCE_ROOTS for name, path in modules(package).items()}


def is_engine_seam(path: Path) -> bool:
    """Only files in an `engines` folder may import one."""
    return "engines" in path.relative_to(ROOT).parts


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> frozenset[str]:
    """Dotted names of modules that a file imports anywhere, also inside functions and `if TYPE_CHECKING`."""
    names = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names |= {name if name in MODULES else node.module for name in whole}
    return frozenset(names)


def tops(path: Path) -> set[str]:
    return {name.partition(".")[0] for name in imports(path)}


def imported_with(names: list[str], heavy: tuple[str, ...], blocked: tuple[str, ...] = ()) -> list[str]:
    """Heavy modules that are there once a new process has imported these, without the blocked packages."""
    code = IMPORT_WITHOUT.format(names=names, heavy=heavy, blocked=blocked)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def tracked() -> list[Path]:
    """Files under version control."""
    done = subprocess.run(["git", "ls-files", "-z"], capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode or not done.stdout:
        pytest.skip("not a clone")
    return [path for name in done.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def test_every_module_imports_with_no_engine_installed() -> None:
    """Entry points, too, which an engine loads at start: importing them must not need the other engine."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points = [project["scripts"], *project["entry-points"].values()]
    targets = {value.partition(":")[0] for group in points for value in group.values()}
    # Below the seam an engine's own classes are subclassed; those modules are imported by the engine only.
    names = {name for name, path in MODULES.items() if not (is_engine_seam(path) and tops(path) & set(ENGINES))}
    assert {name.partition(".")[0] for name in names} == set(SOURCE_ROOTS)
    assert imported_with(sorted(names | targets), heavy=ENGINES, blocked=ENGINES) == []


def test_importing_the_packages_is_light() -> None:
    heavy = (*ENGINES, "torch", "numba", "transformers", "sklearn", "matplotlib")
    names = [name for name in SOURCE_ROOTS if name != "freedraft_kernels"]
    assert imported_with([*names, "freedraft.cli"], heavy) == []


def test_the_metrics_library_is_loaded_with_a_drafter() -> None:
    """Not with the plugins, after which SGLang sets the mode that the library asks for when it is loaded."""
    methods = [f"{package}.method" for package in PLUGINS]
    assert imported_with([*methods, "freedraft.engines.sglang.registration"], ("prometheus_client",)) == []


def test_arrows_point_one_way_and_only_the_seam_imports_an_engine() -> None:
    """kernels <- freedraft <- plugins, which do not know each other."""
    allowed = {"freedraft_kernels": {"freedraft_kernels"}, "freedraft": {"freedraft", "freedraft_kernels"}}
    allowed |= {plugin: {plugin, "freedraft", "freedraft_kernels"} for plugin in PLUGINS}
    for name, path in MODULES.items():
        may = allowed[name.partition(".")[0]] | (set(ENGINES) if is_engine_seam(path) else set())
        assert tops(path) & {*SOURCE_ROOTS, *ENGINES} <= may, name


def test_no_circle_of_imports() -> None:
    """Also none that is closed inside a function or under `TYPE_CHECKING`: it shows that something is misplaced."""
    graph = {name: imports(path) & MODULES.keys() - {name} for name, path in MODULES.items()}
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError, which names one


PRODUCT_LINES, BENCH_LINES = 24_062, 5_847
FILE_LINES, FUNCTION_LINES, ARGUMENTS = 400, 60, 7
# Functions with more positional arguments, and how many. An entry goes with its cause; none is added.
KNOWN = {
    "freedraft/engines/vllm/v2/speculator.py::propose": 8,  # vLLM's own signature
    "layerskip_plugin/knapsack_search.py::search": 10,
}


def lines_of(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def test_nothing_is_too_large_to_be_read() -> None:
    """Triton kernels are left out: each is one piece, and takes what a launch passes."""
    arguments = {}
    for path in MODULES.values():
        assert lines_of(path) <= FILE_LINES, path
        for node in ast.walk(parsed(path)):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if any("jit" in ast.unparse(decorator) for decorator in node.decorator_list):
                continue
            name = f"{path.relative_to(ROOT)}::{node.name}"
            assert (node.end_lineno or node.lineno) - node.lineno < FUNCTION_LINES, name
            taken = [a.arg for a in (*node.args.posonlyargs, *node.args.args) if a.arg not in ("self", "cls")]
            if len(taken) > ARGUMENTS:
                arguments[name] = len(taken)
    assert arguments == KNOWN


def test_product_and_benches_do_not_grow() -> None:
    """What is new takes the place of something, or is worth this number's change."""
    assert sum(map(lines_of, MODULES.values())) <= PRODUCT_LINES
    assert sum(map(lines_of, (ROOT / "bench").rglob("*.py"))) <= BENCH_LINES


def test_no_folder_shadows_a_package_of_an_engine() -> None:
    """SGLang needs a package called `kernels`; a package of that name here would be found first."""
    assert not (ROOT / "kernels" / "__init__.py").exists()
    for name in ENGINES:
        assert not (ROOT / name).exists()
        # pytest imports a test package from the first folder above it that is none: `tests.vllm` is fine, `vllm` not.
        if (ROOT / "tests" / name / "__init__.py").exists():
            assert (ROOT / "tests" / "__init__.py").exists()


def test_nothing_in_the_tree_names_a_machine() -> None:
    """No path of somebody's machine, and no address of this project's machines."""
    path_of_a_machine = re.compile(
        r"(?<![\w.$/{])/(?:work|root|home/\w+|Users/\w+|mnt/\w+|opt/(?:pypi|wheels))(?:/|\b)"
    )
    for path in tracked():
        if path.resolve() == Path(__file__).resolve() or path.name == "LICENSE":
            continue
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
        assert [line.strip()[:100] for line in lines if path_of_a_machine.search(line)] == [], path


def test_nothing_large_or_built_is_tracked() -> None:
    for path in tracked():
        assert path.stat().st_size <= 1_000_000, path
        assert path.suffix not in {".pyc", ".so", ".safetensors", ".gguf", ".nbi"}, path


def test_the_wheel_holds_every_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packed = {Path(p).name for p in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]}
    assert packed == set(SOURCE_ROOTS)
