"""`PagedDraftModel`: the target as a drafter of itself, over vLLM's own weights and paged KV cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from freedraft.draft_model import DraftModel
from freedraft.draft_pass import Recipe
from freedraft.engines.draft_ranks import DraftRanks
from freedraft.engines.on_device import on_device
from freedraft.engines.vllm.draft_graphs import DraftGraphs
from freedraft.engines.vllm.draft_passes import DraftPass, PagedDraftRound
from freedraft.engines.vllm.kept_layers import Backbone, KeptLayers, UnsupportedModel, compiled
from freedraft.engines.vllm.pages import Pages
from freedraft.engines.vllm.set_scores import SetScores
from freedraft.step import Step


class PagedDraftModel(DraftModel):
    """Draft passes of one token per request, in vLLM's forward context, and scores of recipes.

    The past of a request is read from the pages that the target wrote. The pass for position p writes the KV of p,
    which lies past the computed tokens in a block of the same request; the target's next step writes all of these
    positions again before any pass reads them, and only computed tokens are ever prefix-cached.

    Args:
        runner: vLLM's GPUModelRunner, with its KV cache.
        backbone: of its model.

    Raises:
        UnsupportedModel: the KV cache is of several kinds.
    """

    def __init__(self, runner: Any, backbone: Backbone, vllm_config: Any) -> None:
        from vllm.distributed import get_tp_group
        from vllm.forward_context import create_forward_context

        groups = [group for groups in runner.attn_groups for group in groups]
        if len(runner.kv_cache_config.kv_cache_groups) != 1 or len(groups) != 1:
            raise UnsupportedModel("layer skipping needs one KV cache group and one kind of attention in all layers")
        self.n_layers = len(backbone.layers)
        self.runner, self.backbone, self.vllm_config = runner, backbone, vllm_config
        self.group = groups[0]
        # What the model itself looks back to, the same in all layers.
        self.attended: int | None = getattr(backbone.layers[0].self_attn.attn, "sliding_window", None)
        self.compiled: dict[tuple[object, ...], KeptLayers] = {}
        self.device = runner.device
        self.waits = self.device.type != "cpu"
        self.context = create_forward_context(None, vllm_config)
        self.starts_cpu = torch.arange(runner.max_num_reqs + 1, dtype=torch.int32)
        self.starts = self.starts_cpu.to(self.device)
        self.graphs: DraftGraphs | None = None
        self.ranks = DraftRanks(get_tp_group())
        self.not_prefilling = torch.zeros(runner.max_num_reqs, dtype=torch.bool)

    def build(self, recipe: Recipe, *, top_k: int, entropy: bool, optimize: bool) -> DraftPass:
        number = self.ranks.tell("build", recipe, {"top_k": top_k, "entropy": entropy, "optimize": optimize})
        return DraftPass(self._layers(recipe.bits, top_k, entropy, optimize), recipe.window, number)

    def _layers(self, skipped: tuple[bool, ...], top_k: int, entropy: bool, optimize: bool) -> KeptLayers:
        if not optimize:
            return KeptLayers(self.backbone, skipped, top_k, entropy).eval()
        key = (*skipped, top_k, entropy)  # a window is no part of what is compiled
        if key not in self.compiled:
            with self.ranks.together():  # who warm it up
                self.compiled[key] = compiled(self.vllm_config, self.backbone, skipped, top_k, entropy)
        return self.compiled[key]

    def capture(self, table_width: int) -> None:
        """Capture CUDA graphs of what was built to be optimized, where vLLM captures its own.

        Args:
            table_width: most pages of a request in the runner's block table.
        """
        self.graphs = DraftGraphs(self, table_width)
        self.graphs.capture(self.compiled.values())

    def capacities(self, step: Step) -> NDArray[np.int32]:
        # The KV of the last of n tokens is not computed yet: a draft of k writes positions n - 1 to n + k - 2.
        pages = step.engine.pages()
        slots = pages.blocks * pages.block_size - (step.contexts - 1)
        return np.minimum(slots.clip(0), step.capacities).astype(np.int32)

    def start(self, step: Step, draft_pass: DraftPass, rows: NDArray[np.intp], max_draft_len: int) -> PagedDraftRound:
        pages, first = step.engine.pages(), step.contexts.astype(np.int64) - 1
        self.ranks.tell("start", draft_pass.number, pages.rows, first, max_draft_len)
        return PagedDraftRound(self, draft_pass, pages, first, max_draft_len)

    def follow(self, pages: Callable[[], Pages] | None = None) -> None:
        """In ranks other than the first: do what that one does, until it has ended.

        Args:
            pages: of the step, whose rows the first rank names; None where nothing is run yet.
        """

        def start(
            draft_pass: DraftPass, rows: NDArray[np.intp], first: NDArray[np.int64], max_draft_len: int
        ) -> PagedDraftRound:
            assert pages is not None
            return PagedDraftRound(self, draft_pass, pages()._replace(rows=rows), first, max_draft_len)

        self.ranks.follow(self.build, start)

    def scorer(self, window: int) -> SetScores:
        return SetScores(self, window)

    def tensor(self, values: NDArray[Any]) -> torch.Tensor:
        return on_device(values, self.device)

    def run(
        self,
        module: Any,
        inputs: Any,
        *,
        positions: torch.Tensor,
        slots: torch.Tensor,
        lengths: NDArray[np.int32],
        starts: tuple[torch.Tensor, torch.Tensor],
        pages: torch.Tensor,
        draft_index: int = 0,
        lengths_on_device: torch.Tensor | None = None,
        graph_size: int | None = None,
    ) -> Any:
        """`module(inputs, positions)` in a forward context of n requests with the same number of query tokens.

        Args:
            positions: int64 [tokens], of the query tokens.
            slots: int64 [tokens], where their KV is written.
            lengths: int32 [n], tokens that each request's last query token reads, itself included.
            starts: int32 [n + 1], where each request's query tokens begin; on the device and on the host.
            pages: int32 [n, P], block tables.
            draft_index: number of the pass within the step.
            lengths_on_device: what is read there in place of `lengths`.
            graph_size: n, for `module` to capture a CUDA graph, or to replay it; None for neither.
        """
        from vllm.v1.attention.backend import CommonAttentionMetadata

        n, tokens = len(lengths), len(positions)
        lengths_cpu = torch.from_numpy(lengths)
        common = CommonAttentionMetadata(
            query_start_loc=starts[0],
            query_start_loc_cpu=starts[1],
            seq_lens=lengths_cpu.to(self.device) if lengths_on_device is None else lengths_on_device,
            num_reqs=n,
            num_actual_tokens=tokens,
            max_query_len=tokens // n,
            max_seq_len=int(lengths.max()),
            block_table_tensor=pages,
            slot_mapping=slots,
            causal=True,
            positions=positions,
            is_prefilling=self.not_prefilling[:n],
            seq_lens_cpu_upper_bound=lengths_cpu,
        )
        metadata = self.group.build_metadata_for_drafting(common_attn_metadata=common, draft_index=draft_index)
        self.context.attn_metadata = dict.fromkeys(self.group.layer_names, metadata)
        self.context.slot_mapping = dict.fromkeys(self.group.layer_names, slots)
        return self._call(module, inputs, positions, graph_size)

    def replay(self, graph: Any, inputs: torch.Tensor, positions: torch.Tensor) -> Any:
        """The graph that `graph` has captured of inputs of this size."""
        return self._call(graph, inputs, positions, len(inputs))

    def _call(self, module: Any, inputs: Any, positions: torch.Tensor, graph_size: int | None) -> Any:
        from vllm.config import CUDAGraphMode
        from vllm.forward_context import BatchDescriptor, override_forward_context

        context, size = self.context, graph_size
        context.cudagraph_runtime_mode = CUDAGraphMode.NONE if size is None else CUDAGraphMode.FULL
        context.batch_descriptor = None if size is None else BatchDescriptor(size, num_reqs=size, uniform=True)
        with override_forward_context(context):
            return module(inputs, positions)
