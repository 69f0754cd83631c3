"""vLLM's Triton attention backend, which in steps that verify trees gives each draft node its ancestors.

In all other steps it is the stock backend. Where a step has trees beside prompts, the stock kernel attends for all and
ours then for the trees again; where all requests decode, ours attends for all of them. What nodes read stands in
buffers that stay where they are, so that full CUDA graphs of such steps can be replayed with other trees.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from freedraft_kernels import TreeQueries, scratch_size, tree_attention
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

ATTRIBUTE = "_freedraft_trees"
"""Attribute of vLLM's VllmConfig: `TreeBuffers`, from where the backend gets them."""


class TreeBuffers:
    """What the tokens of a step read, where CUDA graphs find it.

    Args:
        requests, tokens: most of a step; max_queries: most nodes of a tree, root included.

    Attributes:
        prefixes, masks, trees: as in `TreeQueries`, of the newest step with drafts.
        enabled: whether graphs and steps use them at all.
        verifying: whether the step that is prepared verifies trees; mixed: whether it has prompts besides.
    """

    def __init__(self, requests: int, tokens: int, max_queries: int, device: torch.device) -> None:
        self.requests, self.max_queries = requests, max_queries
        self.prefixes = torch.ones(tokens, dtype=torch.int32, device=device)
        self.masks = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.trees = torch.zeros(requests, dtype=torch.int32, device=device)
        self.enabled = self.verifying = self.mixed = False

    def queries(self, starts: torch.Tensor, seq_lens: torch.Tensor) -> TreeQueries:
        """Those of a step. starts: int32 [B + 1]; seq_lens: int32 [B]."""
        return TreeQueries(starts, seq_lens, self.prefixes, self.masks, self.trees[: len(seq_lens)])


class TreeStep(NamedTuple):
    """What attention needs in a step that verifies trees."""

    queries: TreeQueries
    max_queries: int
    mixed: bool
    scratch: torch.Tensor


class TreeAttentionMetadataBuilder(TritonAttentionMetadataBuilder):
    """Adds a `TreeStep`, or None, to the metadata as `trees`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._buffers: TreeBuffers | None = getattr(self.vllm_config, ATTRIBUTE, None)
        self._scratch: torch.Tensor | None = None

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        metadata: Any = super().build(common_prefix_len, common_attn_metadata, fast_build)
        buffers = self._buffers
        metadata.trees = None
        if buffers is not None and buffers.verifying:
            metadata.trees = self._step(buffers, metadata, buffers.mixed)
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        metadata: Any = super().build_for_cudagraph_capture(common_attn_metadata)
        buffers = self._buffers
        # Graphs of more than one query are of steps that verify drafts: others have prompts, and run without.
        if buffers is not None and buffers.enabled and metadata.max_query_len > 1:
            metadata.trees = self._step(buffers, metadata, False)
        return metadata

    def _step(self, buffers: TreeBuffers, metadata: Any, mixed: bool) -> TreeStep:
        if self._scratch is None:
            shape = self.num_heads_q, self.num_heads_kv, self.headdim
            longest = self.vllm_config.model_config.max_model_len
            size = scratch_size(buffers.requests, *shape, buffers.max_queries, longest)
            self._scratch = torch.empty(size, dtype=torch.float32, device=self.device)
        mixed |= metadata.max_query_len > buffers.max_queries
        queries = buffers.queries(metadata.query_start_loc, metadata.seq_lens)
        max_queries = buffers.max_queries if mixed else metadata.max_query_len
        return TreeStep(queries, max_queries, mixed, self._scratch)


class TreeAttentionImpl(TritonAttentionImpl):
    """Attends to trees by our kernel."""

    def why_not(self) -> str | None:
        """What this layer has that our kernel has not; None if nothing."""
        extras = {
            "a sliding window": self.sliding_window != (-1, -1) or self.chunk_lookback >= 0,
            "ALiBi": self.alibi_slopes is not None,
            "a soft cap of logits": bool(self.logits_soft_cap),
            "attention sinks": self.sinks is not None,
            f"a KV cache of {self.kv_cache_dtype}": self.kv_cache_dtype not in ("auto", "float16", "bfloat16"),
            f"{self.attn_type} attention": self.attn_type != "decoder",
            "a KV cache that layers share": self.kv_sharing_target_layer_name is not None,
        }
        return next((name for name, has in extras.items() if has), None)

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        trees: TreeStep | None = getattr(attn_metadata, "trees", None)
        if trees is None or trees.mixed:
            super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        if trees is not None:
            tokens, size = attn_metadata.num_actual_tokens, self.head_size
            cache = kv_cache.transpose(1, 2)
            tree_attention(
                query[:tokens],
                cache[..., :size],
                cache[..., size:],
                trees.queries,
                attn_metadata.block_table,
                output[:tokens],
                scale=self.scale,
                max_queries=trees.max_queries,
                max_seq_len=attn_metadata.max_seq_len,
                trees_only=trees.mixed,
                scratch=trees.scratch,
            )
        return output


class TreeAttentionBackend(TritonAttentionBackend):
    """The backend, under the stock one's name."""

    @staticmethod
    def get_impl_cls() -> type[TreeAttentionImpl]:
        return TreeAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TreeAttentionMetadataBuilder]:
        return TreeAttentionMetadataBuilder


def register() -> None:
    """Register it in the stock one's place, unless somebody else's stands there."""
    if not AttentionBackendEnum.TRITON_ATTN.is_overridden():
        path = f"{TreeAttentionBackend.__module__}.{TreeAttentionBackend.__qualname__}"
        register_backend(AttentionBackendEnum.TRITON_ATTN, path)
