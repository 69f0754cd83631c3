"""Tree attention for the CPU platform: SGLang's torch backend with TARGET_VERIFY added; and its KV pool without
Triton."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool


class TreeAttentionBackend(TorchNativeAttnBackend):
    """Attention by torch's SDPA over the paged pool, with a tree mask when draft trees are verified."""

    needs_cpu_seq_lens = True

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        if self.use_sliding_window_kv_pool:
            raise ValueError("freedraft's CPU platform has no pool for sliding windows: --disable-hybrid-swa-memory")

    def forward_extend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        if not forward_batch.forward_mode.is_target_verify():
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        spec, batch = forward_batch.spec_info, forward_batch.batch_size
        nodes = spec.draft_token_num
        query = q.view(batch, nodes, layer.tp_q_head_num, layer.qk_head_dim).transpose(1, 2)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        positions = forward_batch.positions.view(batch, nodes)
        slots_of = self.req_to_token_pool.req_to_token
        window = layer.sliding_window_size if layer.sliding_window_size is not None else -1
        out = q.new_empty(batch, nodes, layer.tp_q_head_num * layer.v_head_dim)
        start = 0  # of each request's cells in the mask
        for i, (row, length) in enumerate(
            zip(forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist(), strict=True)
        ):
            # In the request's row, the slots of the nodes follow those of the cached tokens.
            slots = slots_of[row, : length + nodes]
            end = start + nodes * len(slots)
            mask, start = spec.custom_mask[start:end].view(nodes, -1) if nodes > 1 else None, end
            if window > -1:
                at = torch.cat((torch.arange(length), positions[i]))
                inside = at >= positions[i][:, None] - window
                mask = inside if mask is None else mask & inside
            attended = F.scaled_dot_product_attention(
                query[i : i + 1],
                keys[slots].transpose(0, 1).unsqueeze(0).to(q.dtype),
                values[slots].transpose(0, 1).unsqueeze(0).to(q.dtype),
                attn_mask=mask,
                scale=layer.scaling,
                enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            )
            out[i] = attended[0].transpose(0, 1).reshape(nodes, -1)
        return out.view(batch * nodes, -1)


class CpuKVPool(MHATokenToKVPool):
    """SGLang's KV pool that moves accepted tokens in torch; the original launches a Triton kernel at start-up."""

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None

    def _move_kv_cache_impl(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        for buffer in (*self.k_buffer, *self.v_buffer):
            buffer[tgt_loc] = buffer[src_loc]
