"""One draft length for data-parallel ranks that share experts.

They step together, each as long as the longest, and by a CUDA graph of all requests only if all have one length. Every
few steps vLLM adds up which of them have requests, idle ones included; any positive number means yes. So ours is a vote
for the length that pays for the rank's own requests: all draft the shortest. Nothing else is sent or waited for.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

from freedraft.engines.hooks import check
from freedraft.engines.vllm.context import ATTRIBUTE, SCHEDULE, Configured, configured
from freedraft.engines.vllm.hooks import RANKS_HOOKS
from freedraft.engines.vllm.patching import after, wrap_once
from freedraft.engines.vllm.v2.lengths import OWN
from freedraft.method import METHODS

_error_once = functools.cache(logging.getLogger(__name__).error)
_sum = [0]  # what vLLM added up last
PROBE = 64  # every 64th vote is for the longest length, since drafts may pay again


def agree_on_lengths() -> None:
    """Hook vLLM's engine cores."""
    from vllm.config import VllmConfig, parallel

    wrap_once(VllmConfig, "_maybe_disable_dynamic_sd_for_data_parallel", _keep_lengths)
    if not check(RANKS_HOOKS):
        from vllm.v1.engine.core import DPEngineCoreProc

        wrap_once(parallel, "cpu_all_reduce_", after(lambda _, sums, *args, **more: _sum.__setitem__(0, int(sums[0]))))
        wrap_once(DPEngineCoreProc, "_has_global_unfinished_reqs", _agree)


def _keep_lengths(original: Callable[..., Any], vllm_config: Any) -> None:
    """vLLM removes draft lengths by batch size under data parallelism, because ranks that share experts step together.
    Replicas of a dense model are independent; others agree where the user asks for it, since no GPU has run this."""
    from vllm import envs

    ours, experts = configured(vllm_config), getattr(vllm_config.model_config, "is_moe", False)
    kept = ours.name in METHODS and (not experts or _agrees(vllm_config, ours))
    if kept and envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        return
    original(vllm_config)
    if ours.lengths and getattr(vllm_config.speculative_config, SCHEDULE) is None:
        setattr(vllm_config.speculative_config, ATTRIBUTE, dataclasses.replace(ours, lengths=()))


def _agrees(vllm_config: Any, ours: Configured) -> bool:
    """Whether ranks agree on lengths. With a head they do not: its passes are steps, too."""
    asked = getattr(METHODS[ours.name].options.parse(ours.options), "policy", None) == "auto"
    fits = votes_fit(len(ours.lengths), vllm_config.parallel_config.data_parallel_size)
    return bool(asked and fits and not ours.head and not check(RANKS_HOOKS) and vllm_config.use_v2_model_runner)


def vote(index: int, ranks: int) -> int:
    """For a length by its index, ascending: a digit behind that of no vote."""
    return (ranks + 1) ** (1 + index)


def votes_fit(lengths: int, ranks: int) -> bool:
    """Whether there are lengths, and votes for them fit vLLM's int32."""
    return lengths > 0 and ranks * vote(lengths - 1, ranks) < 2**31


def shortest(votes: int, ranks: int) -> int:
    """Index of the shortest length with a vote; -1: a rank does not vote. votes: their sum, positive."""
    return next(i for i in range(-1, 31) if votes % (ranks + 1) ** (i + 2))


def _agree(original: Callable[..., bool], core: Any, local_unfinished: bool) -> bool:
    """core: vLLM's DPEngineCoreProc, after each of its steps."""
    scheduler, ours = core.scheduler, configured(core.vllm_config)
    table, lengths, ranks = getattr(scheduler, "dynamic_sd_lookup", None), ours.lengths, core.dp_group.size()
    if not table or not votes_fit(len(lengths), ranks):
        return original(core, local_unfinished)
    own = scheduler.__dict__.setdefault(OWN, [*table])
    preferred = own[min(max(1, len(scheduler.running)), len(own) - 1)]
    if (1 + core.step_counter) // core.dp_sync_interval % PROBE == 0:  # the same on all ranks
        preferred = lengths[-1]
    _sum[0] = 0
    unfinished = original(core, local_unfinished and vote(bisect_left(lengths, preferred), ranks))
    if _sum[0] > 0:
        index = shortest(_sum[0], ranks)
        table[:] = [0 if index < 0 else lengths[min(index, len(lengths) - 1)]] * len(table)  # others may have more
        if index < 0:
            _error_once("freedraft: no drafts beside a rank without it, or of another policy: start all ranks alike")
    return unfinished
