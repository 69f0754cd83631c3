"""Draft lengths in model runner V2: sent from the worker that learns them to vLLM's scheduler, with the output of a
step; and CUDA graphs of steps with several draft lengths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from freedraft.engines.vllm.context import configured
from freedraft.method import METHODS

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
