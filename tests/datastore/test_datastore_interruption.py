"""A build that ends early, however it ends, leaves the target absent, or what it was, or whole."""

from __future__ import annotations

import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sssd_plugin.datastore.build.builder import StoreBuilder
from sssd_plugin.datastore.errors import DatastoreError
from tests.support.stores import build_store, documents_at, leftovers, read_only_folder

BUILD_FOREVER = """
import sys
import numpy as np
from sssd_plugin.datastore.build.builder import StoreBuilder

target, replace = sys.argv[1], sys.argv[2] == "replace"
print("ready", flush=True)
for generation in range(1, 1000):
    with StoreBuilder(target if replace else f"{target}-{generation}", vocab_size=2000, sub_index_tokens=30_000,
                      replace=replace) as builder:
        for _ in range(100):
            builder.append(np.array([*[generation] * 1000, -1]))
        builder.finish()
"""


def start(*args: str, **settings: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *args], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings
    )  # type: ignore[call-overload]


def check_whole(path: Path) -> None:
    """100 documents of one generation."""
    tokens = [token for document in documents_at(path) for token in document]
    assert len(tokens) == 100_000 and len({*tokens}) == 1


@pytest.mark.parametrize("mode", ["replace", "new"])
def test_killed_at_random_moments(tmp_path: Path, mode: str) -> None:
    rng = np.random.default_rng(7)
    target = tmp_path / "store"
    unfinished = 0
    for _ in range(12):
        child = start("-c", BUILD_FOREVER, str(target), mode)
        try:
            assert child.stdout and child.stdout.readline() == "ready\n", child.stderr and child.stderr.read()
            time.sleep(rng.uniform(0, 0.25))
        finally:
            child.send_signal(signal.SIGKILL)
            child.communicate()
        unfinished += bool(leftovers(tmp_path))
        stores = [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
        for store in stores:
            check_whole(store)
        if mode == "new":
            # The next build of a target removes what a killed one left of it.
            for name in leftovers(tmp_path):
                build_store(tmp_path / name[1:].split(".building-")[0], [[1]], 10, replace=True)
            assert leftovers(tmp_path) == []
            for path in tmp_path.iterdir():
                shutil.rmtree(path)
    assert unfinished >= 3, "the kills came too early or too late to test anything"
    build_store(target, [[1]], 10, replace=True)
    assert leftovers(tmp_path) == []


def cli(*args: object) -> list[str]:
    return ["-c", "from sssd_plugin.datastore.cli import app; app()", *map(str, args)]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_ctrl_c_leaves_nothing_behind(
    tmp_path: Path, tokenizer_folder: Path, text: str, number: signal.Signals, code: int
) -> None:
    source, out = tmp_path / "source.txt", tmp_path / "out"
    source.write_text(text * 300)
    out.mkdir()
    # A job in the background of a shell, as the tests may be, is started with SIGINT ignored.
    child = start(
        *cli("build", out / "store", source, "--tokenizer", tokenizer_folder),
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + 60  # importing transformers takes a while
        while not leftovers(out):
            assert child.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.1)
        child.send_signal(number)
        _, errors = child.communicate(timeout=20)
    finally:
        child.kill()
    assert child.returncode == code, errors
    assert "Traceback" not in errors
    assert list(out.iterdir()) == []


def test_a_disk_that_refuses(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(100_000) % 50)
    out = tmp_path / "out"
    child = start(
        *cli("build", out / "store", tmp_path / "tokens.npy", "--vocab-size", 50, "--quiet"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)),
    )
    _, errors = child.communicate(timeout=30)
    assert child.returncode == 1
    assert errors.startswith("error: cannot write ") and errors.count("\n") == 1 and "tokens.i32" in errors
    assert list(out.iterdir()) == []


def test_an_exception_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), StoreBuilder(tmp_path / "store", vocab_size=10) as builder:
        builder.append(np.arange(10))
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_living_builders_are_left_alone(tmp_path: Path) -> None:
    with StoreBuilder(tmp_path / "store", vocab_size=10) as slow:
        slow.append(np.arange(10))
        build_store(tmp_path / "store", [[1, 2]], 10)
        assert len(leftovers(tmp_path)) == 1
        with pytest.raises(DatastoreError, match="exists: choose another path, or give --force"):
            slow.finish()
    assert leftovers(tmp_path) == []
    assert documents_at(tmp_path / "store") == [[1, 2]]


def test_only_datastores_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    with pytest.raises(DatastoreError, match=r"is not a datastore .* so it is not replaced"):
        build_store(tmp_path / "home", [[1]], 10, replace=True)
    with pytest.raises(DatastoreError, match=r"thesis.txt is a file"):
        build_store(tmp_path / "home" / "thesis.txt", [[1]], 10, replace=True)
    assert (tmp_path / "home" / "thesis.txt").read_text() == "years of work"
    build_store(tmp_path / "a [strange]*name" / "store", [[1]], 10)
    (tmp_path / "empty").mkdir()
    build_store(tmp_path / "empty", [[1]], 10)
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    build_store(tmp_path / "link", [[2]], 10, replace=True)
    assert (tmp_path / "link").is_symlink()
    assert documents_at(tmp_path / "empty") == [[2]]


def test_a_folder_that_may_not_be_written() -> None:
    with (
        read_only_folder() as folder,
        pytest.raises(DatastoreError, match=r"cannot write .*Permission denied; give this user access"),
    ):
        build_store(folder / "store", [[1]], 10)
