"""vLLM's Triton and FlashAttention backends, which in steps that verify trees give each draft node its ancestors.

In all other steps they are the stock backends. Both have the same KV cache and metadata, so that one kernel serves
both. In a step with trees and prompts the stock kernel runs for all requests, then ours for the trees; if all requests
decode, ours runs for all. The inputs of nodes lie in fixed buffers, so that full CUDA graphs can be replayed with other
trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from freedraft_kernels.device.tree_attention import TreeQueries, scratch_size, tree_attention
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

# Attribute of vLLM's SpeculativeConfig, since VllmConfig is rebuilt from its fields for models of several parts.
ATTRIBUTE = "_freedraft_trees"  # `TreeBuffers`, from where the backend gets them


class TreeBuffers:
    """Fixed buffers of tree queries, for CUDA graphs.

    Args:
        requests, tokens: most of a step; max_queries: most nodes of a tree, root included.

    Attributes:
        prefixes, masks, trees: as in `TreeQueries`, of the newest step with drafts.
        enabled: whether graphs and steps use them at all.
        verifying: whether the present step verifies trees; mixed: whether it also has prompts.
        warming_up: whether it is a dummy step to compile kernels.
    """

    def __init__(self, requests: int, tokens: int, max_queries: int, device: torch.device) -> None:
        self.requests, self.max_queries = requests, max_queries
        self.prefixes = torch.ones(tokens, dtype=torch.int32, device=device)
        self.masks = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.trees = torch.zeros(requests, dtype=torch.int32, device=device)
        self.enabled = self.verifying = self.mixed = self.warming_up = False

    def queries(self, starts: torch.Tensor, seq_lens: torch.Tensor) -> TreeQueries:
        """The queries of a step. starts: int32 [B + 1]; seq_lens: int32 [B]."""
        return TreeQueries(starts, seq_lens, self.prefixes, self.masks, self.trees[: len(seq_lens)])


class TreeStep(NamedTuple):
    """Attention's inputs in a step that verifies trees. compiled_for: contexts to compile kernels for in warm-up; empty
    in steps of requests."""

    queries: TreeQueries
    max_queries: int
    max_seq_len: int
    mixed: bool
    scratch: torch.Tensor
    compiled_for: Sequence[int]


class TreeMetadata:
    """For a metadata builder: adds a `TreeStep`, or None, to the metadata as `trees`."""

    vllm_config: Any
    device: torch.device
    num_heads_q: int
    num_heads_kv: int
    headdim: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._buffers: TreeBuffers | None = getattr(self.vllm_config.speculative_config, ATTRIBUTE, None)
        self._scratch: torch.Tensor | None = None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        metadata: Any = super().build(common_prefix_len, common_attn_metadata, fast_build)  # type: ignore[misc]
        buffers = self._buffers
        metadata.trees = None
        if buffers is not None and buffers.verifying:
            # Blocks for the most queries, so that one kernel serves all draft lengths.
            metadata.trees = step = self._step(buffers, metadata, buffers.max_queries, buffers.mixed)
            if buffers.warming_up:
                limit: int = self.vllm_config.model_config.max_model_len
                powers = [min(1 << i, limit) for i in range(limit.bit_length() + 1)]
                metadata.trees = step._replace(compiled_for=powers)
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        metadata: Any = super().build_for_cudagraph_capture(common_attn_metadata)  # type: ignore[misc]
        buffers = self._buffers
        # Graphs of more than one query are of steps that verify drafts; steps with prompts run without graphs.
        if buffers is not None and buffers.enabled and metadata.max_query_len > 1:
            metadata.trees = self._step(buffers, metadata, min(metadata.max_query_len, buffers.max_queries), False)
        return metadata

    def _step(self, buffers: TreeBuffers, metadata: Any, max_queries: int, mixed: bool) -> TreeStep:
        if self._scratch is None:
            shape = self.num_heads_q, self.num_heads_kv, self.headdim
            limit = self.vllm_config.model_config.max_model_len
            size = scratch_size(buffers.requests, *shape, buffers.max_queries, limit)
            self._scratch = torch.empty(size, dtype=torch.float32, device=self.device)
        mixed |= metadata.max_query_len > buffers.max_queries
        queries = buffers.queries(metadata.query_start_loc, metadata.seq_lens)
        return TreeStep(queries, max_queries, metadata.max_seq_len, mixed, self._scratch, ())


class TreeAttention:
    """For an attention implementation: attends to trees by our kernel."""

    scale: float
    head_size: int

    def why_not(self) -> str | None:
        """A feature of this layer that our kernel lacks; None if there is none."""
        layer: Any = self
        extras = {
            "a sliding window": layer.sliding_window != (-1, -1) or getattr(layer, "chunk_lookback", -1) >= 0,
            "ALiBi": layer.alibi_slopes is not None,
            "a soft cap of logits": bool(layer.logits_soft_cap),
            "attention sinks": layer.sinks is not None,
            f"a KV cache of {layer.kv_cache_dtype}": layer.kv_cache_dtype not in ("auto", "float16", "bfloat16"),
            f"{layer.attn_type} attention": layer.attn_type != "decoder",
            "a KV cache that layers share": layer.kv_sharing_target_layer_name is not None,
        }
        return next((name for name, has in extras.items() if has), None)

    def forward(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        attn_metadata: Any, output: torch.Tensor, *args: Any, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        trees: TreeStep | None = getattr(attn_metadata, "trees", None)
        if trees is None:
            self._stock(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
            return output
        tokens, size = attn_metadata.num_actual_tokens, self.head_size
        cache = kv_cache.transpose(1, 2)

        def attend(queries: TreeQueries, max_seq_len: int, trees_only: bool) -> None:
            tree_attention(
                query[:tokens], cache[..., :size], cache[..., size:], queries, attn_metadata.block_table,
                output[:tokens], scale=self.scale, max_queries=trees.max_queries, max_seq_len=max_seq_len,
                trees_only=trees_only, scratch=trees.scratch,
            )  # fmt: skip

        for context in trees.compiled_for:  # for one request, which splits its keys into the most parts
            attend(trees.queries.first(), context, False)
            attend(trees.queries.first(), context, True)
        if trees.mixed:
            self._stock(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        attend(trees.queries, trees.max_seq_len, trees.mixed)
        return output

    def _stock(self, *args: Any, **kwargs: Any) -> None:
        stock: Any = super()
        stock.forward(*args, **kwargs)


def _with_trees(stock: Any) -> type[AttentionBackend]:
    """A backend with the stock one's `get_name` and support for trees. vLLM imports it by module and name."""
    impl = type(f"Tree{stock.get_impl_cls().__name__}", (TreeAttention, stock.get_impl_cls()), {})
    builder = type(f"Tree{stock.get_builder_cls().__name__}", (TreeMetadata, stock.get_builder_cls()), {})
    members = {"get_impl_cls": staticmethod(lambda: impl), "get_builder_cls": staticmethod(lambda: builder)}
    return type(stock.__name__.replace("Attention", "Tree"), (stock,), members | {"__module__": __name__})


TritonTreeBackend, FlashTreeBackend = _with_trees(TritonAttentionBackend), _with_trees(FlashAttentionBackend)


def register(flash: bool) -> None:
    """Register our backends in place of the stock ones, unless others are registered there."""
    places = {AttentionBackendEnum.TRITON_ATTN: "TritonTreeBackend"}
    if flash:
        places[AttentionBackendEnum.FLASH_ATTN] = "FlashTreeBackend"
    for place, name in places.items():
        if not place.is_overridden():
            register_backend(place, f"{__name__}.{name}")
