"""Building within bounded memory, and with several threads: the same store."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sssd_plugin.datastore.build.builder import format_size, parse_size
from sssd_plugin.datastore.disk.format import read_manifest
from sssd_plugin.datastore.disk.store import Datastore
from sssd_plugin.datastore.errors import DatastoreError
from tests.support.stores import leftovers, one_line, run

VOCAB = 5000
MEASURED = """
import sys
from sssd_plugin.datastore.build.builder import peak_resident_bytes
from sssd_plugin.datastore.cli import app
app(sys.argv[1:], standalone_mode=False)
print(peak_resident_bytes())
"""


def arrays(path: Path) -> list[list[bytes]]:
    store = Datastore.open(path)
    return [[array.tobytes() for array in (sub.tokens, sub.suffix_array, sub.bucket_starts)] for sub in store.snapshot]


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    tokens = (np.random.default_rng(0).zipf(1.2, 60_000) % VOCAB).astype(np.int32)
    tokens[99::100] = -1
    np.save(tmp_path / "ids.npy", tokens)
    return tmp_path / "ids.npy"


def arguments(out: Path, ids: Path, *more: object) -> list[str]:
    common = ("--vocab-size", VOCAB, "--sub-index-tokens", 9000, "--quiet")
    return [str(arg) for arg in ("build", out, ids, *common, *more)]


@pytest.mark.parametrize(
    ("vocab_size", "tokens", "memory", "more"),
    [
        (49_152, 12_000_000, "320MiB", ()),
        (250_000, 8_000_000, "320MiB", ()),
        (60_000, 6_000_000, "600MiB", ("--workers", 2, "--sub-index-tokens", 2_000_000)),
    ],
)
def test_a_build_stays_within_its_memory(
    tmp_path: Path, vocab_size: int, tokens: int, memory: str, more: tuple[object, ...]
) -> None:
    numbers = (np.random.default_rng(0).random(tokens, np.float32) ** 4 * vocab_size).astype(np.int32)
    numbers[:: vocab_size // 100] = -1
    np.save(tmp_path / "ids.npy", numbers)
    options = ["--vocab-size", vocab_size, "--memory", memory, "--quiet", *more]
    command = [sys.executable, "-c", MEASURED, "build", tmp_path / "store", tmp_path / "ids.npy", *options]
    output = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout
    assert 100 << 20 < int(output.splitlines()[-1]) <= parse_size(memory)
    assert 2 <= len(read_manifest(tmp_path / "store").sub_indices) <= 8, "the memory is used"


def test_sizes() -> None:
    assert parse_size("2GiB") == parse_size(" 2 gib ") == 2 << 30
    assert parse_size("1.5MB") == 1_500_000 and parse_size("123") == parse_size("123b") == 123
    for wrong in ("", "two", "-1", "2XB"):
        with pytest.raises(DatastoreError, match="is not a size"):
            parse_size(wrong)
    assert format_size(1536) == "1.5 KiB"


def test_workers_make_the_same_store(tmp_path: Path, ids: Path) -> None:
    assert run(*arguments(tmp_path / "one", ids)).exit_code == 0
    result = run(*arguments(tmp_path / "several", ids, "--workers", 3))
    assert result.exit_code == 0, result.output
    assert arrays(tmp_path / "several") == arrays(tmp_path / "one") and len(arrays(tmp_path / "one")) == 7
    assert run("verify", tmp_path / "several", "--full").exit_code == 0


def test_memory_that_runs_out_is_one_line(tmp_path: Path, ids: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> object:
        raise MemoryError

    monkeypatch.setattr("sssd_plugin.datastore.build.builder.sorted_arrays", fails)
    assert "give a smaller --memory" in one_line(*arguments(tmp_path / "store", ids, "--workers", 2))
    assert not (tmp_path / "store").exists() and leftovers(tmp_path) == []
