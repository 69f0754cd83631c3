"""One draft length for data-parallel ranks that share experts.

They take their steps together, each as long as the longest, and by a CUDA graph only if all have one length. Every few
steps vLLM adds up which of them have requests left, idle ones included, and any positive number means yes. So ours is a
vote for the length that pays for the rank's own requests, and all ranks draft the shortest one. No collective is added;
what a rank without freedraft adds is no vote.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import math
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from freedraft.engines.hooks import check
from freedraft.engines.vllm.context import ATTRIBUTE, SCHEDULE, configured
from freedraft.engines.vllm.hooks import RANKS_HOOKS
from freedraft.engines.vllm.patching import after, wrap_once
from freedraft.engines.vllm.v2.lengths import OWN
from freedraft.method import METHODS

logger = logging.getLogger(__name__)


def agree_on_lengths() -> None:
    """Hook vLLM's engine cores."""
    from vllm.config import VllmConfig

    wrap_once(VllmConfig, "_maybe_disable_dynamic_sd_for_data_parallel", _keep_lengths)
    if not check(RANKS_HOOKS):
        from vllm.config import parallel
        from vllm.v1.engine.core import DPEngineCoreProc

        wrap_once(parallel, "cpu_all_reduce_", after(_note_sum))
        wrap_once(DPEngineCoreProc, "_has_global_unfinished_reqs", _agree)
        wrap_once(DPEngineCoreProc, "execute_dummy_batch", _run_dummy)


def _keep_lengths(original: Callable[..., Any], vllm_config: Any) -> None:
    """vLLM removes draft lengths by batch size under data parallelism, because ranks that share experts step together.
    Replicas of a dense model are independent, others agree. With a head they do not: its passes are steps, too."""
    from vllm import envs

    ours, experts = configured(vllm_config), getattr(vllm_config.model_config, "is_moe", False)
    kept = ours.name in METHODS and not (experts and (ours.head or check(RANKS_HOOKS)))
    if kept and envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        return
    original(vllm_config)
    if ours.lengths and getattr(vllm_config.speculative_config, SCHEDULE) is None:
        setattr(vllm_config.speculative_config, ATTRIBUTE, dataclasses.replace(ours, lengths=()))


class Ballot:
    """Votes as one sum. Its digits count the votes for each length, behind those of ranks that do not vote and have
    requests. size: number of ranks."""

    reduced = 0  # what vLLM added up last

    def __init__(self, size: int) -> None:
        self._base = size + 1
        self._most = int(math.log((2**31 - 1) / size, self._base))  # vLLM's sum is an int32

    def vote(self, index: int) -> int:
        """For a length by its index, ascending; longer ones than the sum holds count as the longest that it does."""
        return self._base ** min(1 + index, self._most)

    def shortest(self, total: int) -> int:
        """Index of the shortest length with a vote; -1: a rank does not vote. total: positive."""
        return next(i for i in itertools.count(-1) if total % self._base ** (i + 2))


def _note_sum(_: Any, tensor: Any, *args: Any, **kwargs: Any) -> None:
    Ballot.reduced = int(tensor[0])


def _agree(original: Callable[..., bool], core: Any, local_unfinished: bool) -> bool:
    """core: vLLM's DPEngineCoreProc, after each of its steps."""
    scheduler, ours = core.scheduler, configured(core.vllm_config)
    if not (table := getattr(scheduler, "dynamic_sd_lookup", None)) or ours.name not in METHODS:
        return original(core, local_unfinished)
    own = scheduler.__dict__.setdefault(OWN, [*table])
    lengths = ours.lengths or sorted({*own[1:]})
    preferred = own[min(max(1, len(scheduler.running)), len(own) - 1)]
    ballot, Ballot.reduced = Ballot(core.dp_group.size()), 0
    unfinished = original(core, local_unfinished and ballot.vote(bisect_left(lengths, preferred)))
    if Ballot.reduced > 0:
        agreed = ballot.shortest(Ballot.reduced)
        table[:] = [lengths[min(agreed, len(lengths) - 1)] if agreed >= 0 else 0] * len(table)
        if agreed < 0 and not getattr(core, OWN, False):
            setattr(core, OWN, True)  # said once
            logger.error(
                "freedraft: another rank has no freedraft, or another policy: no drafts while it has requests; "
                "start all ranks with one --speculative-config"
            )
    return unfinished


def _run_dummy(original: Callable[..., None], core: Any) -> None:
    """A rank without requests steps as long as the others do: its worker does not know what they draft."""
    if hasattr(core.scheduler, OWN):
        core.collective_rpc("execute_dummy_batch", args=(1 + core.scheduler.dynamic_sd_lookup[-1],))
    else:
        original(core)


def dummy_of_length(original: Callable[..., None], worker: Any, query_length: int | None = None) -> None:
    """`execute_dummy_batch` of vLLM's Worker, of one request with so many tokens."""
    runner, usual = worker.model_runner, worker.model_runner.decode_query_len
    runner.decode_query_len = query_length or usual
    try:
        original(worker)
    finally:
        runner.decode_query_len = usual
