"""`RaySorter`: sub-indices are sorted by the tasks of an existing Ray cluster, one each."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import warnings
from urllib.parse import urlsplit

from sssd_plugin.datastore.build.memory import format_size
from sssd_plugin.datastore.build.sorting import Arrays, Int32, Sorter, sort
from sssd_plugin.datastore.errors import DatastoreError

HEALTH_SECONDS = 15.0


class RaySorter(Sorter):
    """Tokens and results go through Ray's object store: nodes need freedraft, but no shared disk.

    Args:
        address: of the cluster ("host:6379", "ray://host:10001", "auto"), or "local" for one on this machine.
        memory: bytes per task, by which Ray schedules tasks.

    Raises:
        DatastoreError: ray is not installed, or there is no cluster.
    """

    def __init__(self, address: str, memory: int) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        try:
            import ray
        except ImportError:
            raise DatastoreError("--ray needs ray: in the clone of freedraft, pip install '.[ray]'") from None
        _check_answers(address)
        try:
            with warnings.catch_warnings(action="ignore"):
                ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
                nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        except Exception as error:
            raise DatastoreError(_one_line(f"cannot use the Ray cluster at {address}", error)) from None
        if not any(node.get("CPU", 0) >= 1 and node.get("memory", 0) >= memory for node in nodes):
            ray.shutdown()  # a task too large for every node would wait for ever
            size = format_size(memory)
            raise DatastoreError(f"no node of the Ray cluster at {address} has {size}: give a smaller --memory")
        self.in_memory, self.beside = 0, max(1, int(sum(node.get("CPU", 0) for node in nodes)))
        self._ray, self._task = ray, ray.remote(num_cpus=1, memory=memory, max_retries=2)(sort)

    def close(self) -> None:
        self._ray.shutdown()  # cancels the tasks that still run

    def _sort(self, tokens: Int32, direct: int, memory: int) -> Arrays:
        try:
            return self._task.remote(self._ray.put(tokens), direct, memory).future().result()
        except Exception as error:
            raise DatastoreError(_one_line("a Ray task failed", error)) from None


def _check_answers(address: str) -> None:
    """Refuse an address without Ray: `ray.init` would retry for minutes and fail with many lines."""
    if address in ("auto", "local"):
        return
    try:
        parts = urlsplit(address if "://" in address else f"//{address}")
        socket.create_connection((parts.hostname or "", parts.port or 0), timeout=5).close()
        if "://" not in address:  # Ray's client has its own timeout
            command = [sys.executable, "-m", "ray.scripts.scripts", "health-check", "--address", address]
            subprocess.run(command, capture_output=True, timeout=HEALTH_SECONDS, check=True)
        return
    except subprocess.SubprocessError:
        reason = "what listens there does not answer as one"
    except (OSError, ValueError) as error:
        reason = str(error)
    raise DatastoreError(
        f"cannot reach a Ray cluster at {address}: {reason}; correct --ray (host:6379, ray://host:10001 or auto), "
        f"or build here with --workers"
    )


def _one_line(what: str, error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return f"{what}: {lines[-1][:300]}; see its logs, or build here with --workers"  # earlier lines: a traceback
