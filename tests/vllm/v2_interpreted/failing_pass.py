"""A draft pass that one tensor-parallel rank cannot prepare: a plugin of vLLM, for all its processes.

For processes that have this folder on PYTHONPATH and FAILING_PASS set to its number, counted from 1 in each rank.
"""

from __future__ import annotations

import itertools
import os


def install() -> None:
    if not (number := os.environ.get("FAILING_PASS")):
        return
    from vllm.distributed import get_tp_group

    from freedraft.engines.vllm.draft_passes import PagedDraftRound

    original, counted = PagedDraftRound._ready, itertools.count(1)

    def _ready(self, *args, **kwargs):
        if next(counted) == int(number) and get_tp_group().rank_in_group == 1:
            raise RuntimeError("this rank has no room for a draft pass")
        return original(self, *args, **kwargs)

    PagedDraftRound._ready = _ready
