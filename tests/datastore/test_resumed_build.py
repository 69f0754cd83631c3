"""A build with --resume that is killed goes on where it was, and makes the same store."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sssd_plugin.datastore.build.checkpoint import BuildCheckpoint
from sssd_plugin.datastore.build.sources import Piece, find_inputs
from sssd_plugin.datastore.tokenizer import load
from tests.support.stores import documents_at, leftovers, run

STOPPING = """
import sys, time
from sssd_plugin.datastore.build import checkpoint, sources
sources.BATCH_CHARS, checkpoint.CHECKPOINT_SECONDS = 500, 0.0
original = checkpoint.read_pieces
def stopping(*arguments):
    for number, piece in enumerate(original(*arguments)):
        time.sleep(60 if number >= int(sys.argv[1]) else 0)
        yield piece
checkpoint.read_pieces = stopping
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
    kept = []
    for stop in (12, 30, 60):
        process = subprocess.Popen(
            [sys.executable, "-c", STOPPING, str(stop), "build", str(target), *common, "--resume"],
            stderr=subprocess.PIPE,
            text=True,
        )
        progress = tmp_path / ".store.resume" / "progress.json"
        for _ in range(5000):
            if progress.exists() and json.loads(progress.read_text())["pieces"] > stop - 5:
                break
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        process.wait()
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
        patch.setattr("sssd_plugin.datastore.build.checkpoint.read_pieces", None)  # nothing is read twice
        assert read(checkpoint()) == tokens and first.n_tokens == len(tokens)
    (inputs / "0.txt").write_text("another text")
    assert checkpoint().n_tokens == 0


def test_a_mixed_batch_is_not_cut(tmp_path: Path, tokenizer_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Text that waits for its batch while token ids come: what is not in the file must not count as read."""
    from sssd_plugin.datastore.build import checkpoint as module

    pieces = [Piece("def return", True, 10), Piece(np.array([1, 2]), False, 8), Piece("self import", True, 11),
              Piece(np.array([3, -1]), True, 8)]  # fmt: skip
    (tmp_path / "x.txt").write_text("x")
    monkeypatch.setattr(module, "CHECKPOINT_SECONDS", 0.0)
    tokenizer = load(tokenizer_folder)
    whole: list[int] = []
    for stop in range(len(pieces) + 1):

        def read(inputs: object, fields: object, stop: int = stop):
            for number, piece in enumerate(pieces):
                if number == stop:
                    raise KeyboardInterrupt
                yield piece

        monkeypatch.setattr(module, "read_pieces", read)
        target = tmp_path / f"store{stop}"
        if stop < len(pieces):
            broken = BuildCheckpoint(target, find_inputs([tmp_path / "x.txt"]), ["text"], None, 1000)
            with pytest.raises(KeyboardInterrupt), contextlib.closing(broken):
                list(broken.blocks(tokenizer))
        monkeypatch.setattr(module, "read_pieces", lambda *a: iter(pieces))
        with BuildCheckpoint(target, find_inputs([tmp_path / "x.txt"]), ["text"], None, 1000) as checkpoint:
            found = np.concatenate([block.tokens for block in checkpoint.blocks(tokenizer)]).tolist()
        whole = whole or found
        assert found == whole


def test_one_build_at_a_time_and_ids_are_checked(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.array([1, 5, 99]))
    arguments = ("build", tmp_path / "store", tmp_path / "ids.npy", "--resume", "--quiet", "--vocab-size")
    result = run(*arguments, 50)
    assert result.exit_code == 1 and "99 is outside the vocabulary" in result.stderr
    held = BuildCheckpoint(tmp_path / "store", find_inputs([tmp_path / "ids.npy"]), ["text"], None, 100)
    result = run(*arguments, 100)
    assert result.exit_code == 1 and "another build uses" in result.stderr
    held.close()
    assert run(*arguments, 100).exit_code == 0
    assert documents_at(tmp_path / "store") == [[1, 5, 99]]
    assert not (tmp_path / ".store.resume").exists()
