"""Building with several threads, and on a Ray cluster: the same store, in bounded memory, and nothing left behind."""

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

from sssd_plugin.datastore.build.memory import parse_size
from sssd_plugin.datastore.disk.store import Datastore
from tests.support.stores import leftovers, run

VOCAB = 5000
CLI = [sys.executable, "-c", "from sssd_plugin.datastore.cli import app; app()"]


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


def arguments(out: Path, ids: Path, *more: object) -> list[str]:
    common = ("--vocab-size", VOCAB, "--sub-index-tokens", 9000, "--quiet")
    return [str(arg) for arg in ("build", out, ids, *common, *more)]


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
    result = run(*arguments(tmp_path / "store", ids, "--workers", 2))
    assert result.exit_code == 1 and "give a smaller --memory" in result.stderr and result.stderr.count("\n") == 1
    assert not (tmp_path / "store").exists() and leftovers(tmp_path) == []


@pytest.mark.parametrize("stopped", [False, True])
def test_workers_stay_within_the_memory_and_end_with_ctrl_c(tmp_path: Path, stopped: bool) -> None:
    """While several sort what takes them seconds."""
    np.save(tmp_path / "ids.npy", np.random.default_rng(0).integers(0, 60_000, 6_000_000).astype(np.int32))
    out = tmp_path / "out"
    command = [*CLI, *arguments(out / "store", tmp_path / "ids.npy", "--workers", 2, "--memory", "600MiB")]
    command[command.index("--vocab-size") + 1] = "60000"
    command[command.index("--sub-index-tokens") + 1] = "2000000"
    child = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    peak = 0
    try:
        while child.poll() is None:
            try:
                status = Path(f"/proc/{child.pid}/status").read_text()
                peak = max(peak, int(status.partition("VmHWM:")[2].split()[0]) << 10)
            except (OSError, IndexError):
                continue  # it ends
            if stopped and len(list(out.glob(".store.building-*/*"))) >= 3:
                child.send_signal(signal.SIGINT)
                child.wait(20)
            time.sleep(0.01)
        _, errors = child.communicate()
    finally:
        child.kill()
    if stopped:
        assert child.returncode == 130 and "Traceback" not in errors, errors
        assert list(out.iterdir()) == []
    else:
        assert child.returncode == 0 and 100 << 20 < peak <= parse_size("600MiB")


@pytest.mark.parametrize("address", ["127.0.0.1:9", "ray://127.0.0.1:9", "nonsense", "host:port"])
def test_a_ray_address_that_nobody_listens_at(tmp_path: Path, ids: Path, address: str) -> None:
    started = time.monotonic()
    result = run(*arguments(tmp_path / "store", ids, "--ray", address))
    assert result.exit_code == 1 and f"cannot reach a Ray cluster at {address}: " in result.stderr
    assert result.stderr.count("\n") == 1 and time.monotonic() - started < 10 and not (tmp_path / "store").exists()


def test_a_port_where_something_else_listens(tmp_path: Path, ids: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sssd_plugin.datastore.build.ray_sorting.HEALTH_SECONDS", 4.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        result = run(*arguments(tmp_path / "store", ids, "--ray", f"127.0.0.1:{server.getsockname()[1]}"))
    assert result.exit_code == 1 and "does not answer as one" in result.stderr and result.stderr.count("\n") == 1


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
ray_sorting.sort = fails
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """A Ray cluster of one node on this machine; its address."""
    child = subprocess.Popen([sys.executable, "-c", CLUSTER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    yield child.stdout.readline().strip()
    child.communicate()


def build_on(cluster: str, out: Path, ids: Path, memory: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """In a process of its own: Ray's threads outlive its shutdown, and now and then crash then."""
    command = [*CLI[:2], f"{before}\n{CLI[2]}", *arguments(out, ids, "--ray", cluster, "--memory", memory)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.extended
def test_a_ray_cluster_makes_the_same_store(tmp_path: Path, ids: Path, cluster: str) -> None:
    assert run(*arguments(tmp_path / "one", ids)).exit_code == 0
    result = build_on(cluster, tmp_path / "store", ids, "700MiB")
    assert result.returncode == 0, result.stderr
    assert arrays(tmp_path / "store") == arrays(tmp_path / "one")
    assert run("verify", tmp_path / "store", "--full").exit_code == 0


@pytest.mark.extended
@pytest.mark.parametrize(
    ("memory", "before", "words"),
    [("4GiB", "", ["no node of the Ray cluster"]), ("700MiB", FAILING, ["a Ray task failed", "without freedraft"])],
)
def test_what_goes_wrong_on_the_cluster_is_one_line(
    tmp_path: Path, ids: Path, cluster: str, memory: str, before: str, words: list[str]
) -> None:
    result = build_on(cluster, tmp_path / "store", ids, memory, before)
    assert result.returncode == 1 and result.stderr.count("\n") == 1 and all(word in result.stderr for word in words)
    assert not (tmp_path / "store").exists() and leftovers(tmp_path) == []
