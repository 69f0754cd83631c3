"""A part of drafting that fails on one tensor-parallel rank: a plugin of vLLM, for all its processes.

For processes that have this folder on PYTHONPATH and FAILING set to the part's name, which time it fails, counted from
1 in each rank, and the rank, with spaces between: "ready 7 1".
"""

from __future__ import annotations

import itertools
import os


def install():
    if not (failing := os.environ.get("FAILING")):
        return
    from vllm.distributed import get_tp_group

    from freedraft.engines.vllm.draft_model import PagedDraftModel, PagedDraftRound

    part, time, rank = failing.split()
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
