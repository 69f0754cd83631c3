"""A build that ends early, however it ends, leaves the target absent, or what it was, or whole.

With --resume it goes on where it was, and makes the same store.
"""

from __future__ import annotations

import contextlib
import json
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sssd_plugin.datastore.build.builder import StoreBuilder
from sssd_plugin.datastore.build.sources import BuildCheckpoint, Piece, find_inputs
from sssd_plugin.datastore.tokenizer import load
from tests.support.stores import build_store, documents_at, leftovers, one_line, read_only_folder, refused, run
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


def cli(*args: object) -> list[str]:
    return ["-c", "from sssd_plugin.datastore.cli import app; app()", *map(str, args)]


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
    child = start(
        *cli("build", out / "store", *more), cwd=tmp_path, preexec_fn=lambda: signal.signal(number, signal.SIG_DFL)
    )
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
    child = start(
        *cli("build", out / "store", tmp_path / "tokens.npy", "--vocab-size", 50, "--quiet"),
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000)),
    )
    _, errors = child.communicate(timeout=30)
    assert child.returncode == 2
    assert errors.startswith("error: cannot write ") and errors.count("\n") == 1 and "tokens.i32" in errors
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


STOPPING = """
import sys, time
from sssd_plugin.datastore.build import sources
sources.BATCH_CHARS, sources.CHECKPOINT_SECONDS = 500, 0.0
original = sources.read_pieces
def stopping(*arguments):
    for number, piece in enumerate(original(*arguments)):
        time.sleep(60 if number >= int(sys.argv[1]) else 0)
        yield piece
sources.read_pieces = stopping
from sssd_plugin.datastore.cli import app
app(sys.argv[2:])
"""


@pytest.fixture
def inputs(tmp_path: Path, text: str) -> Path:
    folder = tmp_path / "inputs"
    folder.mkdir()
    for number in range(3):
        rows = [text[a : a + 700] for a in range(number, 20_000, 700)]
        (folder / f"{number}.jsonl").write_text("".join(json.dumps({"text": row}) + "\n" for row in rows))
        (folder / f"{number}.txt").write_text(text[number : number + 5_000])
    np.save(folder / "ids.npy", np.tile(np.array([1, 2, 3, 4, -1]), 500))
    return folder


def test_a_killed_build_goes_on(tmp_path: Path, inputs: Path, tokenizer_folder: Path) -> None:
    common = [str(inputs), "--tokenizer", str(tokenizer_folder), "--sub-index-tokens", "5000", "--quiet"]
    assert run("build", tmp_path / "plain", *common).exit_code == 0
    target = tmp_path / "store"
    progress, kept = tmp_path / ".store.resume" / "progress.json", []
    for stop in (12, 30, 60):
        process = start("-c", STOPPING, str(stop), "build", str(target), *common, "--resume")
        wait_until(lambda stop=stop: progress.exists() and json.loads(progress.read_text())["pieces"] > stop - 5, 60)
        assert process.poll() is None
        process.kill()
        process.communicate()
        kept.append(json.loads(progress.read_text())["pieces"])
    assert kept[0] < kept[1] < kept[2] and not target.exists()
    result = run("build", target, *common, "--resume")
    assert result.exit_code == 0 and "going on after" in result.stderr, result.output
    assert documents_at(target) == documents_at(tmp_path / "plain")
    assert not (tmp_path / ".store.resume").exists() and leftovers(tmp_path) == []
    assert run("verify", target, "--full").exit_code == 0


def test_changed_inputs_begin_anew(tmp_path: Path, inputs: Path, tokenizer_folder: Path) -> None:
    tokenizer = load(tokenizer_folder)

    def checkpoint() -> BuildCheckpoint:
        return BuildCheckpoint(tmp_path / "store", find_inputs([inputs]), ["text"], None, 1000)

    def read(what: BuildCheckpoint) -> list[int]:
        with contextlib.closing(what):
            return np.concatenate([block.tokens for block in what.blocks(tokenizer)]).tolist()

    first = checkpoint()
    tokens = read(first)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sssd_plugin.datastore.build.sources.read_pieces", None)  # nothing is read twice
        assert read(checkpoint()) == tokens and first.n_tokens == len(tokens)
    (inputs / "0.txt").write_text("another text")
    assert checkpoint().n_tokens == 0


@pytest.mark.parametrize("stop", range(4))
def test_a_mixed_batch_is_not_cut(tmp_path: Path, tokenizer_folder: Path, monkeypatch, stop: int) -> None:
    """Text that waits for its batch while token ids come: what is not in the file must not count as read."""
    pieces = [Piece("def return", True, 10), Piece(np.array([1, 2]), False, 8), Piece("self import", True, 11),
              Piece(np.array([3, -1]), True, 8)]  # fmt: skip
    (tmp_path / "x.txt").write_text("x")
    monkeypatch.setattr("sssd_plugin.datastore.build.sources.CHECKPOINT_SECONDS", 0.0)
    tokenizer = load(tokenizer_folder)

    def tokens(target: str, stops: bool = False) -> list[int]:
        def read(*arguments: object) -> Iterator[Piece]:
            yield from pieces[: stop if stops else None]
            if stops:
                raise KeyboardInterrupt

        monkeypatch.setattr("sssd_plugin.datastore.build.sources.read_pieces", read)
        checkpoint = BuildCheckpoint(tmp_path / target, find_inputs([tmp_path / "x.txt"]), ["text"], None, 1000)
        with contextlib.closing(checkpoint):
            return np.concatenate([block.tokens for block in checkpoint.blocks(tokenizer)]).tolist()

    with pytest.raises(KeyboardInterrupt):
        tokens("store", stops=True)
    assert tokens("store") == tokens("plain")


def test_one_build_at_a_time_and_ids_are_checked(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.array([1, 5, 99]))
    arguments = ("build", tmp_path / "store", tmp_path / "ids.npy", "--resume", "--quiet", "--vocab-size")
    assert "99 is outside the vocabulary" in one_line(*arguments, 50)
    held = BuildCheckpoint(tmp_path / "store", find_inputs([tmp_path / "ids.npy"]), ["text"], None, 100)
    assert "another build uses" in one_line(*arguments, 100)
    held.close()
    assert run(*arguments, 100).exit_code == 0
    assert documents_at(tmp_path / "store") == [[1, 5, 99]]
    assert not (tmp_path / ".store.resume").exists()
