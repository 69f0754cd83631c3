"""Building with several processes, and on a Ray cluster: the same store, in bounded memory, and nothing left behind."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from sssd_plugin.datastore.build.memory import parse_size, sub_index_limit
from sssd_plugin.datastore.build.ray_sorting import RaySorter
from sssd_plugin.datastore.cli import app
from sssd_plugin.datastore.disk.store import Datastore
from sssd_plugin.datastore.errors import DatastoreError
from tests.support.stores import leftovers

VOCAB = 5000


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def arrays(path: Path) -> list[tuple[bytes, bytes, bytes]]:
    with Datastore.open(path) as store:
        return [
            (sub.tokens.tobytes(), sub.suffix_array.tobytes(), sub.bucket_starts.tobytes())
            for sub in store.snapshot.sub_indices
        ]


@pytest.fixture
def ids(tmp_path: Path) -> Path:
    tokens = (np.random.default_rng(0).zipf(1.2, 60_000) % VOCAB).astype(np.int32)
    tokens[99::100] = -1
    np.save(tmp_path / "ids.npy", tokens)
    return tmp_path / "ids.npy"


def build(out: Path, ids: Path, *args: object) -> Result:
    return run("build", out, ids, "--vocab-size", VOCAB, "--sub-index-tokens", 9000, "--quiet", *args)


@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_workers_make_the_same_store(tmp_path: Path, ids: Path, resume: list[str]) -> None:
    assert build(tmp_path / "one", ids).exit_code == 0
    result = build(tmp_path / "several", ids, "--workers", 3, *resume)
    assert result.exit_code == 0, result.output
    assert arrays(tmp_path / "several") == arrays(tmp_path / "one") and len(arrays(tmp_path / "one")) == 7
    assert run("verify", tmp_path / "several", "--full").exit_code == 0


def test_workers_share_the_memory() -> None:
    assert sub_index_limit(4 << 30, sorts=4) <= sub_index_limit(4 << 30) / 4
    elsewhere = sub_index_limit(1 << 30, sorts=0, each=RaySorter.process_bytes)
    assert elsewhere == ((1 << 30) - RaySorter.process_bytes) // 9
    with pytest.raises(DatastoreError, match="too little: give at least"):
        sub_index_limit(300 << 20, sorts=32)


def test_memory_that_runs_out_is_one_line(tmp_path: Path, ids: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> object:
        raise MemoryError

    monkeypatch.setattr("sssd_plugin.datastore.build.sorting.sort_sections", fails)
    result = build(tmp_path / "store", ids, "--workers", 2)
    assert result.exit_code == 1 and "give a smaller --memory" in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "store").exists() and leftovers(tmp_path) == []


def test_ctrl_c_ends_the_workers(tmp_path: Path) -> None:
    """While several sort what takes them seconds."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, 12_000_000).astype(np.int32)
    np.save(tmp_path / "ids.npy", tokens)
    out = tmp_path / "out"
    command = ["build", str(out / "store"), str(tmp_path / "ids.npy"), "--vocab-size", str(VOCAB), "--workers", "2"]
    child = subprocess.Popen(
        [sys.executable, "-c", "from sssd_plugin.datastore.cli import app; app()", *command, "--sub-index-tokens",
         "4000000"],
        stderr=subprocess.PIPE, text=True, preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    try:
        names: list[str] = []
        for _ in range(2000):
            tasks = Path(f"/proc/{child.pid}/task").iterdir()
            names = [name for task in tasks if (name := (task / "comm").read_text().strip()).startswith("freedraft-su")]
            if len(names) >= 2 or len(list(out.glob(".store.building-*/*"))) >= 3:
                break
            assert child.poll() is None, child.stderr.read() if child.stderr else ""
            time.sleep(0.01)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=20)
    finally:
        child.kill()
    assert child.returncode == 130 and "Traceback" not in errors, errors
    assert list(out.iterdir()) == []


def test_a_build_with_workers_stays_within_its_memory(tmp_path: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 60_000, 6_000_000).astype(np.int32)
    np.save(tmp_path / "ids.npy", tokens)
    bound = parse_size("600MiB")
    child = subprocess.Popen(
        [sys.executable, "-c", "from sssd_plugin.datastore.cli import app; app()", "build", str(tmp_path / "store"),
         str(tmp_path / "ids.npy"), "--vocab-size", "60000", "--workers", "2", "--memory", "600MiB",
         "--sub-index-tokens", "2000000", "--quiet"]
    )  # fmt: skip
    peak = 0
    while child.poll() is None:
        peak = max(peak, tree_bytes(child.pid))
        time.sleep(0.02)
    assert child.returncode == 0 and 100 << 20 < peak <= bound


def tree_bytes(pid: int) -> int:
    """Memory of a process and its children, pages that they share counted once."""
    total = 0
    try:
        total += int(next(line for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                          if line.startswith("Pss:")).split()[1]) * 1024  # fmt: skip
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(map(tree_bytes, map(int, (task / "children").read_text().split())))
    except (OSError, StopIteration):
        pass
    return total


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("127.0.0.1:9", "cannot reach a Ray cluster at 127.0.0.1:9"),
        ("ray://127.0.0.1:9", "cannot reach a Ray cluster at ray://127.0.0.1:9"),
        ("nonsense", "no address of a Ray cluster"),
        ("host:port", "no address of a Ray cluster"),
    ],
)
def test_a_ray_address_that_nobody_listens_at(tmp_path: Path, ids: Path, address: str, words: str) -> None:
    started = time.monotonic()
    result = build(tmp_path / "store", ids, "--ray", address)
    assert result.exit_code == 1 and words in result.stderr and result.stderr.count("\n") == 1
    assert time.monotonic() - started < 10 and not (tmp_path / "store").exists()


def test_a_port_where_something_else_listens(tmp_path: Path, ids: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr("sssd_plugin.datastore.build.ray_sorting.HEALTH_SECONDS", 4.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        result = build(tmp_path / "store", ids, "--ray", f"127.0.0.1:{server.getsockname()[1]}")
    assert result.exit_code == 1 and "does not answer as one" in result.stderr and result.stderr.count("\n") == 1


def test_workers_and_ray_exclude_each_other(tmp_path: Path, ids: Path) -> None:
    assert "not both" in build(tmp_path / "store", ids, "--ray", "auto", "--workers", 2).stderr


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
from sssd_plugin.datastore.build import ray_sorting
def fails(*arguments):
    raise ValueError("a node without freedraft")
ray_sorting.sort_remotely = fails
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A Ray cluster of one node on this machine; its address."""
    pytest.importorskip("ray")
    child = subprocess.Popen([sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    yield child.stdout.readline().strip()
    child.communicate()


def run_apart(*args: object, before: str = "") -> subprocess.CompletedProcess[str]:
    """In a process of its own: Ray's threads outlive its shutdown, and now and then crash then."""
    code = f"{before}\nfrom sssd_plugin.datastore.cli import app\napp()"
    command = [sys.executable, "-c", code, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def build_on(cluster: str, out: Path, ids: Path, memory: str, before: str = "") -> subprocess.CompletedProcess[str]:
    settings = ("--vocab-size", VOCAB, "--sub-index-tokens", 9000, "--quiet", "--ray", cluster, "--memory", memory)
    return run_apart("build", out, ids, *settings, before=before)


def test_a_ray_cluster_makes_the_same_store(tmp_path: Path, ids: Path, cluster: str) -> None:
    assert build(tmp_path / "one", ids).exit_code == 0
    result = build_on(cluster, tmp_path / "store", ids, "700MiB")
    assert result.returncode == 0, result.stderr
    assert arrays(tmp_path / "store") == arrays(tmp_path / "one")
    assert run("verify", tmp_path / "store", "--full").exit_code == 0


def test_what_goes_wrong_on_the_cluster_is_one_line(tmp_path: Path, ids: Path, cluster: str) -> None:
    result = build_on(cluster, tmp_path / "store", ids, "4GiB")
    assert result.returncode == 1 and "no node of the Ray cluster" in result.stderr
    result = build_on(cluster, tmp_path / "store", ids, "700MiB", before=FAILING)
    assert result.returncode == 1 and "a Ray task failed" in result.stderr and result.stderr.count("\n") == 1
    assert "without freedraft" in result.stderr
    assert not (tmp_path / "store").exists() and leftovers(tmp_path) == []
