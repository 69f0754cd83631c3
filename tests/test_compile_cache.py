"""Compiled code that is older than its sources is dropped; anything else is kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from freedraft import compile_cache


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two packages, one with a folder inside; their sources are an hour old."""
    for folder in (tmp_path / "plugin", tmp_path / "plugin" / "datastore", tmp_path / "freedraft"):
        (folder / "__pycache__").mkdir(parents=True)
        write(folder / "module.py", -3600)
    monkeypatch.setattr(compile_cache, "_PACKAGES", (tmp_path / "freedraft", tmp_path / "plugin"))
    return tmp_path / "plugin"


def write(path: Path, age: int) -> Path:
    path.write_text("x")
    now = path.stat().st_mtime
    os.utime(path, (now + age, now + age))
    return path


def test_an_upgrade_drops_all_older_code(package: Path) -> None:
    """numba checks the outermost function's file only, so one changed source makes all of it stale."""
    old = [write(package / "__pycache__" / "a.nbi", -7200), write(package / "datastore/__pycache__/b.nbi", -7200)]
    newer = write(package / "__pycache__" / "c.nbi", 0)
    others = [write(package / "__pycache__" / name, -7200) for name in ("a.1.nbc", "a.cpython-311.pyc")]
    compile_cache.drop_stale()
    assert not any(path.exists() for path in old)
    assert newer.exists() and all(path.exists() for path in others)
    write(package / "datastore" / "module.py", 10)
    compile_cache.drop_stale()
    assert not newer.exists()


@pytest.mark.parametrize("changed", ["freedraft/module.py", "plugin/module.py", "plugin/datastore/module.py"])
def test_code_of_every_package_goes(package: Path, changed: str) -> None:
    """A plugin's compiled functions and freedraft's own may both call what has changed."""
    folders = (package, package / "datastore", package.parent / "freedraft")
    old = [write(folder / "__pycache__" / "a.nbi", -60) for folder in folders]
    compile_cache.drop_stale()
    assert all(path.exists() for path in old)
    write(package.parent / changed, -30)
    compile_cache.drop_stale()
    assert not any(path.exists() for path in old)


def test_an_upgrade_of_a_called_function_takes_effect(tmp_path: Path) -> None:
    """The controller's compiled code calls that of the step times: the latter's new price must be used."""
    package = tmp_path / "freedraft"
    (package / "cost").mkdir(parents=True)
    shutil.copy(compile_cache.__file__, package)
    (package / "__init__.py").write_text("from freedraft import compile_cache")
    (package / "controller.py").write_text(
        "from numba import njit\nfrom freedraft.cost.step_times import at\n"
        "@njit(cache=True)\ndef choose():\n    return at()\nprint(choose())\n"
    )

    def price(value: int) -> str:
        called = package / "cost" / "step_times.py"
        called.write_text(f"from numba import njit\n@njit(cache=True)\ndef at():\n    return {value}\n")
        command = [sys.executable, "-c", "import freedraft.controller"]
        environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
        return subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True, timeout=120
        ).stdout

    assert price(1) == "1\n" and list((package / "__pycache__").glob("*.nbi"))
    assert price(2) == "2\n"


def test_nothing_to_drop(package: Path) -> None:
    (package / "datastore" / "__pycache__").rmdir()
    compile_cache.drop_stale()
    kept = write(package / "__pycache__" / "a.nbi", -60)
    compile_cache.drop_stale()
    assert kept.exists()


def test_a_folder_that_may_not_be_written(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(package / "__pycache__" / "a.nbi", -7200)

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "read-only", str(self))

    monkeypatch.setattr(Path, "unlink", refuse)
    compile_cache.drop_stale()
