"""Building within bounded memory, with several threads, and on a Ray cluster: the same store."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from sssd_plugin.datastore.build.sorting import format_size, parse_size, sub_index_memory
from sssd_plugin.datastore.disk.format import read_manifest
from sssd_plugin.datastore.disk.store import Datastore
from sssd_plugin.datastore.errors import DatastoreError
from tests.support.stores import leftovers, one_line, run

VOCAB = 5000
CLI = [sys.executable, "-c", "from sssd_plugin.datastore.cli import app; app()"]
MEASURED = """
import sys
from sssd_plugin.datastore.build.sorting import peak_resident_bytes
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


def test_sorting_gets_what_memory_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sssd_plugin.datastore.build.sorting.resident_bytes", lambda: 100 << 20)
    assert 1_600_000_000 < sub_index_memory(2 << 30) < 2 << 30
    assert sub_index_memory(4 << 30, sorts=4) <= sub_index_memory(4 << 30) / 4
    assert sub_index_memory(1 << 30, sorts=0) == (1024 - 192) << 20, "nothing of it is this process's"
    for bytes_, sorts in ((50 << 20, 1), (300 << 20, 32)):
        with pytest.raises(DatastoreError, match=r"--memory \d+.0 MiB is too little: give at least"):
            sub_index_memory(bytes_, sorts=sorts)


def test_sizes() -> None:
    assert parse_size("2GiB") == parse_size("2g") == parse_size(" 2 GiB ") == 2 << 30
    assert parse_size("1.5MB") == 1_500_000 and parse_size("123") == parse_size("123b") == 123
    for wrong in ("", "two", "-1", "2XB", "GiB", "1e9"):
        with pytest.raises(DatastoreError, match="is not a size"):
            parse_size(wrong)
    assert format_size(1536) == "1.5 KiB"


@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_workers_make_the_same_store(tmp_path: Path, ids: Path, resume: list[str]) -> None:
    assert run(*arguments(tmp_path / "one", ids)).exit_code == 0
    result = run(*arguments(tmp_path / "several", ids, "--workers", 3, *resume))
    assert result.exit_code == 0, result.output
    assert arrays(tmp_path / "several") == arrays(tmp_path / "one") and len(arrays(tmp_path / "one")) == 7
    assert run("verify", tmp_path / "several", "--full").exit_code == 0


def test_memory_that_runs_out_is_one_line(tmp_path: Path, ids: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> object:
        raise MemoryError

    monkeypatch.setattr("sssd_plugin.datastore.build.sorting.sort", fails)
    assert "give a smaller --memory" in one_line(*arguments(tmp_path / "store", ids, "--workers", 2))
    assert not (tmp_path / "store").exists() and leftovers(tmp_path) == []


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9", "nonsense", "host:port", "something else"])
def test_a_ray_address_that_no_cluster_listens_at(
    tmp_path: Path, ids: Path, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    monkeypatch.setattr("sssd_plugin.datastore.build.sorting.HEALTH_SECONDS", 1.0)
    started = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = address == "something else"
        address = f"127.0.0.1:{server.getsockname()[1]}" if other else address
        error = one_line(*arguments(tmp_path / "store", ids, "--ray", address))
    assert ("does not answer as one" if other else f"cannot reach a Ray cluster at {address}: ") in error
    assert time.monotonic() - started < 10 and not (tmp_path / "store").exists()


CLUSTER = """
import sys
from ray.cluster_utils import Cluster
given = {"num_cpus": 2, "memory": 1 << 30, "object_store_memory": 100 << 20, "include_dashboard": False}
made = Cluster(initialize_head=True, head_node_args=given)
print(made.address, flush=True)
sys.stdin.read()
made.shutdown()
"""
FAILING = """
from sssd_plugin.datastore.build import sorting
def fails(*arguments):
    raise ValueError("a node without freedraft")
sorting.sort = fails
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A Ray cluster of one node on this machine; its address."""
    child = subprocess.Popen([sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    yield child.stdout.readline().strip()
    child.communicate()


@pytest.mark.extended
@pytest.mark.parametrize(
    ("memory", "before", "words"),
    [
        ("700MiB", "", []),
        ("4GiB", "", ["no node of the Ray cluster"]),
        ("700MiB", FAILING, ["a Ray task failed", "without freedraft"]),
    ],
)
def test_a_ray_cluster_makes_the_same_store_or_one_line(
    tmp_path: Path, ids: Path, cluster: str, memory: str, before: str, words: list[str]
) -> None:
    """In a process of its own: Ray's threads outlive its shutdown, and now and then crash then."""
    more = arguments(tmp_path / "store", ids, "--ray", cluster, "--memory", memory)
    command = [*CLI[:2], f"{before}\n{CLI[2]}", *more]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if words:
        assert result.returncode == 2 and result.stderr.count("\n") == 1 and all(w in result.stderr for w in words)
        assert not (tmp_path / "store").exists() and leftovers(tmp_path) == []
        return
    assert result.returncode == 0, result.stderr
    assert run(*arguments(tmp_path / "one", ids)).exit_code == 0
    assert arrays(tmp_path / "store") == arrays(tmp_path / "one")
    assert run("verify", tmp_path / "store", "--full").exit_code == 0
