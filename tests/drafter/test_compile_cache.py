"""Compiled code that is older than its sources is dropped; anything else is kept."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sssd_plugin import compile_cache


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package of two folders, its sources an hour old."""
    folders = (tmp_path, tmp_path / "datastore")
    for folder in folders:
        (folder / "__pycache__").mkdir(parents=True)
        write(folder / "module.py", -3600)
    monkeypatch.setattr(compile_cache, "_FOLDERS", folders)
    return tmp_path


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
