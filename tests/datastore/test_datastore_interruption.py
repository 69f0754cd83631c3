"""A build that ends early, however it ends, leaves the target absent, or what it was, or whole."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sssd_plugin.datastore.build.builder import StoreBuilder
from tests.support.disks import full_disk
from tests.support.stores import build_store, documents_at, leftovers, one_line, read_only_folder, refused
from tests.support.waiting import wait_until

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


@pytest.mark.parametrize(
    ("number", "code", "workers"), [(signal.SIGINT, 130, 0), (signal.SIGTERM, 143, 0), (signal.SIGINT, 130, 2)]
)
def test_ctrl_c_leaves_nothing_behind(
    tmp_path: Path, tokenizer_folder: Path, text: str, number: signal.Signals, code: int, workers: int
) -> None:
    """While text is read, and while several workers sort what takes them seconds."""
    out = tmp_path / "out"
    out.mkdir()
    if workers:
        np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 60_000, 6_000_000).astype(np.int32))
        more = ["ids.npy", "--workers", workers, "--vocab-size", 60_000, "--sub-index-tokens", 2_000_000]
    else:
        (tmp_path / "source.txt").write_text(text * 300)
        more = ["source.txt", "--tokenizer", tokenizer_folder]
    # A job in the background of a shell, as the tests may be, is started with SIGINT ignored.
    command = ("-c", "from sssd_plugin.datastore.cli import app; app()", "build", out / "store", *more)
    child = start(*map(str, command), cwd=tmp_path, preexec_fn=lambda: signal.signal(number, signal.SIG_DFL))
    try:
        begun = ".store.building-*/*" if workers else ".store.building-*"
        wait_until(lambda: child.poll() is not None or len(list(out.glob(begun))) > workers, 60)
        time.sleep(0.1)
        assert child.poll() is None
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
    with full_disk(200_000):
        message = one_line("build", out / "store", tmp_path / "tokens.npy", "--vocab-size", 50, "--quiet")
    assert "cannot write " in message and "tokens.i32" in message
    assert list(out.iterdir()) == []


def test_builders_that_fail_and_that_live(tmp_path: Path) -> None:
    """The one leaves nothing behind, and the other is left alone."""
    with pytest.raises(RuntimeError), StoreBuilder(tmp_path / "store", vocab_size=10) as builder:
        builder.append(np.arange(10))
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    with StoreBuilder(tmp_path / "store", vocab_size=10) as slow:
        slow.append(np.arange(10))
        build_store(tmp_path / "store", [[1, 2]], 10)
        assert len(leftovers(tmp_path)) == 1
        with refused("exists: choose another path, or give --force"):
            slow.finish()
    assert leftovers(tmp_path) == []
    assert documents_at(tmp_path / "store") == [[1, 2]]


def test_only_datastores_are_replaced(tmp_path: Path) -> None:
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "thesis.txt").write_text("years of work")
    with refused(r"is not a datastore .* so it is not replaced"):
        build_store(tmp_path / "home", [[1]], 10, replace=True)
    with refused(r"thesis.txt is a file"):
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
    with read_only_folder() as folder, refused("cannot write .*Permission denied; give this user access"):
        build_store(folder / "store", [[1]], 10)
