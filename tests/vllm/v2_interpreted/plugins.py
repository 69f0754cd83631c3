"""Plugins of vLLM, for all its processes that have this folder on PYTHONPATH, as the environment asks for them."""

from __future__ import annotations

import itertools
import os


def install():
    """SERVED_AS_ON_GPUS: what an API server needs to run model runner V2 here as on GPUs."""
    if os.environ.get("SERVED_AS_ON_GPUS") and os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
        from tests.vllm.v2_interpreted import serve

        serve.take_any_mask()
        serve.filter_as_on_cpus()
        serve.schedule_asynchronously()
    if os.environ.get("ADAPTIVE"):
        import by_score

        by_score.install()
    if os.environ.get("FAILING"):
        fail_on_a_rank(*os.environ["FAILING"].split())


def fail_on_a_rank(part, time, rank):
    """A part of drafting fails on one tensor-parallel rank: its name, which time it fails, counted from 1 in each rank,
    and the rank, as in FAILING="ready 7 1"."""
    from vllm.distributed import get_tp_group

    from freedraft.engines.vllm.draft_model import PagedDraftModel, PagedDraftRound

    owner, name = {
        "model": (PagedDraftModel, "__init__"),
        "ready": (PagedDraftRound, "_ready"),  # before all ranks have agreed that they can
        "pass": (PagedDraftRound, "_output"),  # and behind it
    }[part]
    original, counted = getattr(owner, name), itertools.count(1)

    def fail(self, *args, **kwargs):
        if next(counted) == int(time) and get_tp_group().rank_in_group == int(rank):
            raise RuntimeError("this rank fails on purpose")
        return original(self, *args, **kwargs)

    setattr(owner, name, fail)
