"""The server on two tensor-parallel ranks, and as two data-parallel replicas."""

from __future__ import annotations

import os

import pytest
from vllm_server import clients_that_go_away, complete, metric, metrics, serving

from tests.support.models import save, tiny_model
from tests.support.prompts import SHORT

CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
ONE_CORE_EACH = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, CORES[:2])), "VLLM_USE_AOT_COMPILE": "0"}
SSSD = {"method": "sssd", "num_speculative_tokens": 6, "policy": "fixed", "live": True, "isolation": "shared"}
# Heads of 64, which vLLM's CPU attention has, and enough of them for two ranks.
SHAPE = {"vocab_size": 49152, "hidden_size": 256, "intermediate_size": 256, "head_dim": 64}

pytestmark = pytest.mark.skipif(len(CORES) < 2, reason="needs two cores")


@pytest.fixture(scope="module")
def model(demo_model, tmp_path_factory):
    return save(tiny_model(seed=7, **SHAPE), tmp_path_factory.mktemp("model"), demo_model)


@pytest.mark.extended
def test_two_tensor_parallel_ranks(model, tmp_path):
    ranks = ("--tensor-parallel-size", "2")
    with serving(model, tmp_path, SSSD, *ranks, **ONE_CORE_EACH) as server:
        clients_that_go_away(server, SHORT[:4])
        assert "2 tensor-parallel ranks" in server.log.read_text()


@pytest.mark.extended
def test_two_data_parallel_replicas(model, tmp_path):
    """Each serves its metrics at a port of its own and learns, into one folder."""
    replicas = ("--data-parallel-size", "2")
    speculative = SSSD | {"datastore": str(tmp_path / "store")}
    with serving(model, tmp_path, speculative, *replicas, drafters=2, **ONE_CORE_EACH) as server:
        clients_that_go_away(server, SHORT[:4])
        assert min(metrics(server, "freedraft_draft_tokens_total")) > 0, "both draft"
    written = sum(path.stat().st_size for path in (tmp_path / "store").rglob("*") if path.is_file())
    assert written > 0
    with serving(model, tmp_path, speculative, *replicas, drafters=2, **ONE_CORE_EACH) as server:
        before = metric(server, "freedraft_accepted_tokens_total")
        assert complete(server.port, SHORT[0]) and metric(server, "freedraft_accepted_tokens_total") > before
