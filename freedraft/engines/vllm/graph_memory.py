"""How much of the device CUDA graphs of draft passes take, for vLLM to leave it out of its KV cache."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from freedraft.engines.vllm.draft_graphs import BACKENDS, graph_sizes
from freedraft.method import Method

logger = logging.getLogger(__name__)

MIN_GRAPH_BYTES = 1 << 20  # Of a graph, as vLLM counts its own
# Of a logit: as the model gives it, in fp32, and what its sum of exponentials takes besides, in fp32 too
LOGIT_BYTES = 12


def graph_bytes(own: int, captured: Sequence[int], max_requests: int, passes: int, vocab_size: int) -> int:
    """Device memory for the graphs of `passes` draft passes: each as large as one of vLLM's own for the whole model, on
    average, and once, since all replay in one pool, the logits of the largest, which vLLM's own leave to their caller.
    own: vLLM's estimate for its own graphs, 0 where it captures none."""
    if own <= 0 or not captured or not passes:
        return 0
    sizes = graph_sizes(captured, max_requests)
    return passes * len(sizes) * max(own // len(captured), MIN_GRAPH_BYTES) + sizes[-1] * vocab_size * LOGIT_BYTES


def with_draft_graphs(passes_of: Callable[[Any], int | None]) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """For `wrap_once` of a model runner's `profile_cudagraph_memory`, which says how much vLLM leaves out of its KV
    cache: let it count the graphs of draft passes too. passes_of: how many draft passes a runner will capture, asked on
    each rank and taken from the first one, which alone knows; None where it has no drafter of ours."""

    def make(original: Callable[..., int]) -> Callable[..., int]:
        def profile_cudagraph_memory(self: Any, *args: Any, **kwargs: Any) -> int:
            own = original(self, *args, **kwargs)
            config = self.vllm_config.compilation_config
            passes, layers = passes_of(self), config.static_forward_context.values()
            backends = {layer.attn_backend.get_name() for layer in layers if hasattr(layer, "attn_backend")}
            if passes is None or not backends.issubset(BACKENDS):
                return own
            vocab_size = self.vllm_config.model_config.get_vocab_size()
            ours = graph_bytes(own, config.cudagraph_capture_sizes or (), self.max_num_reqs, passes, vocab_size)
            if ours:
                logger.info("freedraft: CUDA graphs of draft passes, by estimate: %.0f MiB", ours / 2**20)
            return own + ours

        return profile_cudagraph_memory

    return make


def passes_on_all_ranks(method: Method | None) -> int:
    """What the first rank's method will capture, on every rank."""
    from vllm.distributed import get_tp_group

    passes, group = 0 if method is None else method.optimized_passes, get_tp_group()
    return int(group.broadcast_object(passes, src=0)) if group.world_size > 1 else passes
