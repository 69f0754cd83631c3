"""`DraftGraphs`: CUDA graphs of draft passes, per skip set and batch size; and the memory that vLLM reserves for them.

A graph reads buffers that are filled before each replay; a batch between two sizes is padded. Attention's metadata is
that of the capture: for the backends in `BACKENDS`, all of it that depends on the batch lies in these buffers.
"""

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from freedraft.engines.vllm.forward import NO_SLOT, BlockTables, Forward, PassInputs
from freedraft.engines.vllm.kept_layers import KeptLayers
from freedraft.guarded_method import is_device_fault

logger = logging.getLogger(__name__)

BACKENDS = ("FLASH_ATTN", "TRITON_ATTN")
MIN_GRAPH_BYTES = 1 << 20  # per graph, as vLLM counts its own
# Bytes per logit: the model's, an fp32 copy, and fp32 scratch of its logsumexp
LOGIT_BYTES = 12


def graph_sizes(captured: Sequence[int] | None, max_requests: int) -> list[int]:
    """Batches that draft passes are captured for: powers of two, up to vLLM's own largest graph."""
    most = min(max(captured or (max_requests,)), max_requests)
    return [*(1 << i for i in range((most - 1).bit_length())), most]


class DraftGraphs:
    """CUDA graphs of one model; empty until `capture`, if vLLM captures none, and after a failed capture."""

    failed = False

    def __init__(self, model: Forward, table_width: int) -> None:
        self._model = model
        captured = model.vllm_config.compilation_config.cudagraph_capture_sizes
        self._sizes = graph_sizes(captured, model.runner.max_num_reqs)
        most, device = self._sizes[-1], model.device
        self._inputs = torch.zeros(3, most, dtype=torch.int64, device=device)  # tokens, positions, slots
        self._inputs[2] = NO_SLOT
        self._lengths = torch.ones(most, dtype=torch.int32, device=device)
        self._pages = torch.zeros(most, table_width, dtype=torch.int32, device=device)
        self._tables: BlockTables | None = None  # the contents of `_pages`
        self._graphs: dict[KeptLayers, Any] = {}

    def capture(self, passes: Iterable[KeptLayers]) -> None:
        """Capture these passes if vLLM captures graphs; passes that cannot be captured run eagerly. Raises
        EngineMustEnd: capturing, which ranks do together, failed on one of them."""
        from vllm.config import CUDAGraphMode

        config = self._model.vllm_config.compilation_config
        off = DraftGraphs.failed or config.cudagraph_mode == CUDAGraphMode.NONE
        if off or self._model.device.type != "cuda":
            return
        if reason := self._why_not():
            logger.warning("freedraft: draft passes run without CUDA graphs (%s)", reason)
            return
        from vllm.compilation import monitor
        from vllm.compilation.cuda_graph import CUDAGraphWrapper
        from vllm.distributed.parallel_state import graph_capture

        allowed = monitor.cudagraph_capturing_enabled
        monitor.set_cudagraph_capturing_enabled(True)
        try:
            free = torch.cuda.mem_get_info()[0]
            with self._model.ranks.together(), graph_capture(device=self._model.device):
                self.record(passes, CUDAGraphWrapper)
        except Exception as error:
            if is_device_fault(error):
                raise
            logger.warning("freedraft: draft passes run without CUDA graphs, which could not be captured (%s)", error)
            self._graphs.clear()
            DraftGraphs.failed = True
            return
        finally:
            monitor.set_cudagraph_capturing_enabled(allowed)
        taken = (free - torch.cuda.mem_get_info()[0]) / 2**20
        number = len(self._graphs) * len(self._sizes)
        logger.info("freedraft: %d CUDA graphs of draft passes, %.0f MiB", number, taken)

    def _why_not(self) -> str:
        """Why replays would read wrong inputs; "" if they do not."""
        group = self._model.group
        if (backend := group.backend.get_name()) not in BACKENDS:
            return f"attention {backend}"
        if group.kernel_block_size is not None:  # attention reads its own block table, built on the host
            return "attention's pages are smaller than those of the KV cache"
        return ""

    @torch.inference_mode()
    def record(self, passes: Iterable[KeptLayers], wrap: Callable[..., Any]) -> None:
        """Call each pass at each size until `wrap` (vLLM's CUDAGraphWrapper) has its graphs."""
        from vllm.config import CUDAGraphMode

        model = self._model
        for layers in passes:
            graph = wrap(layers, model.vllm_config, CUDAGraphMode.FULL)
            for size in reversed(self._sizes):  # so that smaller ones reuse the largest one's memory
                for captured in (False, True):
                    model.run(
                        graph,
                        self._inputs[0, :size],
                        positions=self._inputs[1, :size],
                        slots=self._inputs[2, :size],
                        # Kernels are chosen for the longest context; they read the lengths of each replay.
                        lengths=np.full(size, model.runner.max_model_len, np.int32),
                        lengths_on_device=self._lengths[:size],
                        pages=self._pages[:size],
                        graph_size=size if captured else None,
                    )
            self._graphs[layers] = graph

    def run(self, layers: KeptLayers, of_pass: PassInputs) -> torch.Tensor | None:
        """Results of a pass over n requests, [n, ...], copied so that later replays do not overwrite them; None without
        a graph."""
        n, tables = len(of_pass.slots), of_pass.tables
        if (graph := self._graphs.get(layers)) is None or n > self._sizes[-1]:
            return None
        size = self._sizes[bisect_left(self._sizes, n)]
        self._inputs[:2, :n].copy_(of_pass.inputs)
        self._inputs[2, :n].copy_(of_pass.slots)
        self._inputs[2, n:size] = NO_SLOT
        self._lengths[:n].copy_(of_pass.lengths_on_device)
        self._lengths[n:size] = 0
        if self._tables is not tables:
            self._pages[:n, : tables.read.shape[1]].copy_(tables.read)
            self._tables = tables
        output: torch.Tensor = self._model.call(graph, self._inputs[0, :size], self._inputs[1, :size], size)
        return output[:n].clone()


def with_draft_graphs(
    drafter_of: Callable[[Any], Any], original: Callable[..., int], runner: Any, *args: Any, **kwargs: Any
) -> int:
    """In place of a model runner's `profile_cudagraph_memory`, which returns the memory that vLLM leaves out of its KV
    cache (0 if it captures no graphs): add the graphs of draft passes, per graph the average of vLLM's own, and once
    (one pool) the logits of the largest batch, which vLLM's own graphs do not contain. drafter_of: ours of a runner;
    None without one."""
    own = original(runner, *args, **kwargs)
    config = runner.vllm_config.compilation_config
    passes, layers = passes_to_capture(drafter_of(runner)), config.static_forward_context.values()
    backends = {layer.attn_backend.get_name() for layer in layers if hasattr(layer, "attn_backend")}
    captured = config.cudagraph_capture_sizes
    if not passes or not backends.issubset(BACKENDS) or own <= 0 or not captured:
        return own
    sizes = graph_sizes(captured, runner.max_num_reqs)
    ours = passes * len(sizes) * max(own // len(captured), MIN_GRAPH_BYTES)
    ours += sizes[-1] * runner.vllm_config.model_config.get_vocab_size() * LOGIT_BYTES
    logger.info("freedraft: CUDA graphs of draft passes, by estimate: %.0f MiB", ours / 2**20)
    return own + ours


def passes_to_capture(drafter: Any) -> int | None:
    """The number of passes that rank 0's method will capture, on every rank. drafter: ours of a runner; None: another
    one's."""
    from vllm.distributed import get_tp_group

    if drafter is None:
        return None
    passes, group = 0 if drafter.guarded is None else drafter.guarded.method.optimized_passes, get_tp_group()
    return int(group.broadcast_object(passes, src=0)) if group.world_size > 1 else passes
