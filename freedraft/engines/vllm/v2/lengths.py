"""Draft lengths in model runner V2: sent from the worker that learns them to vLLM's scheduler, with the output of a
step; CUDA graphs of steps with several draft lengths; and one length for data-parallel ranks that share experts.

These ranks step together, each as long as the longest, and by a CUDA graph of all requests only if all have one length.
Every few steps vLLM adds up which of them have requests, idle ones included; any positive number means yes. So ours is
a vote for the length that pays for the rank's own requests: all draft the shortest. Nothing else is sent or waited for.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

from freedraft.engines.hooks import check
from freedraft.engines.vllm.context import ATTRIBUTE, SCHEDULE, Configured, configured
from freedraft.engines.vllm.hooks import RANKS_HOOKS
from freedraft.engines.vllm.patching import after, wrap_once
from freedraft.method import METHODS

_error_once = functools.cache(logging.getLogger(__name__).error)
_sum = [0]  # what vLLM added up last
PROBE = 64  # every 64th vote is for the longest length, since drafts may pay again
LENGTHS = "_freedraft_lengths"  # Attribute of vLLM's ModelRunnerOutput: draft lengths by batch size, `Rows`
OWN = "_freedraft_own"  # of a Scheduler whose rank shares experts: the table by its own requests, int [batch size]


def receive_lengths(scheduler: Any, scheduler_output: Any, model_runner_output: Any, *args: Any, **kwargs: Any) -> None:
    """Update the scheduler's table of draft lengths by batch size from received rows."""
    table = getattr(scheduler, OWN, scheduler.dynamic_sd_lookup)
    for first, last, length in getattr(model_runner_output, LENGTHS, ()) if table else ():
        last = min(last, len(table) - 1)
        table[first : last + 1] = [length] * (last + 1 - first)


class GraphLengths(list[tuple[int, int, int]]):
    """A list of draft lengths in the form of vLLM's table by batch size, each length once, longest first. Its batch
    sizes mean nothing. lengths: ascending."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__((i, i, length) for i, length in enumerate(reversed(lengths), 1))


def whole_table(original: Callable[..., Any], table: Any, vllm_max_batch_size: int, *args: Any, **kwargs: Any) -> Any:
    """Keep the rows of a `GraphLengths` beyond vLLM's largest batch size."""
    largest = max(vllm_max_batch_size, len(table)) if isinstance(table, GraphLengths) else vllm_max_batch_size
    return original(table, largest, *args, **kwargs)


def find_nearest(_: None, manager: Any) -> None:
    """Make vLLM look for a step's graph among graphs of all sizes. Its own search (as of 0.33) ends at the nearest
    size, of which all graphs may be of other lengths. manager: vLLM's CudaGraphManager, after `_init_candidates`."""
    if configured(manager.vllm_config).name in METHODS:
        graphs = [graph for graphs in manager._capture_descs.values() for graph in graphs]
        put_nearest_first(manager._candidates, graphs)


def put_nearest_first(candidates: dict[tuple[int, int], list[Any]], graphs: list[Any]) -> None:
    """Order candidates by tokens and LoRAs of a step: of every query length the smallest graph that fits, then vLLM's
    others. graphs: its BatchExecutionDescriptors."""
    nearest: dict[tuple[int, int], dict[tuple[int, int], Any]] = {}
    for graph in sorted(graphs, key=lambda graph: -graph.num_tokens):
        if graph.uniform_token_count is not None:
            for tokens in range(graph.num_tokens + 1):
                alike = graph.uniform_token_count, graph.num_ubatches
                nearest.setdefault((tokens, graph.num_active_loras), {})[alike] = graph
    for at, found in nearest.items():
        others = [graph for graph in candidates.get(at, ()) if graph not in found.values()]
        candidates[at] = [*found.values(), *others]


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
