"""Two data-parallel replicas: each has metrics of its own, and one of them writes what is learnt."""

from __future__ import annotations

import os
import socket
import urllib.request

import pytest

from tests.sglang.conftest import GREEDY, ids, sglang_engine, token_ids
from tests.support.models import continuations
from tests.support.prompts import REPETITIVE as PROMPTS

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


def two_free_ports() -> int:
    """The first of two neighbours."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port


@pytest.mark.extended
@pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")
def test_two_replicas(tiny, tmp_path):
    expected = continuations(tiny, token_ids(tiny, PROMPTS[:4]), 40)
    port = two_free_ports()
    env = {
        "FREEDRAFT_METRICS_PORT": str(port),
        "FREEDRAFT_LIVE": "true",
        "SGLANG_CPU_OMP_THREADS_BIND": "|".join(map(str, CORES[:2])),  # else SGLang wants a NUMA node for each
        "FREEDRAFT_DATASTORE": str(tmp_path / "store"),
    }
    with sglang_engine(tiny, env=env, speculative_algorithm="sssd", dp_size=2) as engine:
        for _ in range(2):
            assert ids(engine.generate(PROMPTS[:4], GREEDY)) == expected
        for replica in range(2):
            with urllib.request.urlopen(f"http://127.0.0.1:{port + replica}/metrics", timeout=10) as page:
                values = dict(line.rsplit(" ", 1) for line in page.read().decode().splitlines() if line[:1] != "#")
            assert float(values['freedraft_draft_tokens_total{method="sssd"}']) > 0
            assert float(values['freedraft_failures_total{method="sssd"}']) == 0
