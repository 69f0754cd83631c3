"""Tree attention for the CPU platform: SGLang's torch backend with TARGET_VERIFY added; and its KV pool without
Triton."""

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
        if model_runner.use_mla_backend:
            from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

            # Prompts, too, attend to the latent keys of the pool.
            handlers.AttentionBackendRegistry.register("torch_native", handlers._dispatch_mla_subtype)

    def forward_extend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, sinks: torch.Tensor | None = None, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        if forward_batch.forward_mode.is_target_verify():
            cached = forward_batch.seq_lens.tolist()
            new = [forward_batch.spec_info.draft_token_num] * len(cached)
        elif sinks is None:
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        else:
            cached, new = forward_batch.extend_prefix_lens.tolist(), forward_batch.extend_seq_lens.tolist()
        kept = (k, v) if save_kv_cache and k is not None else None
        return self._attend(q, kept, layer, forward_batch, cached, new, sinks)

    def forward_decode(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, forward_batch: Any,
        save_kv_cache: bool = True, sinks: torch.Tensor | None = None, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        if sinks is None:
            return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
        cached = (forward_batch.seq_lens - 1).tolist()
        kept = (k, v) if save_kv_cache and k is not None else None
        return self._attend(q, kept, layer, forward_batch, cached, [1] * len(cached), sinks)

    def _attend(
        self, q: torch.Tensor, kept: tuple[torch.Tensor, torch.Tensor] | None, layer: Any, forward_batch: Any,
        cached: list[int], new: list[int], sinks: torch.Tensor | None,
    ) -> torch.Tensor:  # fmt: skip
        """Return the output for `new[b]` tokens of each request behind `cached[b]` in the pool; trees by their mask.
        kept: K and V to store; sinks: a logit for each head that takes part in the softmax, with no value."""
        if kept is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), *kept)
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        tree = forward_batch.spec_info.custom_mask if forward_batch.forward_mode.is_target_verify() else None
        window = layer.sliding_window_size if layer.sliding_window_size is not None else -1
        out = q.new_empty(len(query), layer.tp_q_head_num * layer.v_head_dim)
        first, cell = 0, 0  # of each request, and in the mask
        for row, length, count in zip(forward_batch.req_pool_indices.tolist(), cached, new, strict=True):
            # In the request's row, the slots of new tokens follow those of the cached ones.
            slots = self.req_to_token_pool.req_to_token[row, : length + count]
            end = first + count
            positions = forward_batch.positions[first:end]
            positions = positions - positions[0] + length  # some models count from 1
            mask = None  # of a single token, which sees all
            if count > 1 and tree is not None:
                mask = tree[cell : cell + count * len(slots)].view(count, -1)
            elif count > 1:
                mask = torch.arange(len(slots)) <= length + torch.arange(count)[:, None]
            if window > -1:
                inside = torch.cat((torch.arange(length), positions)) >= positions[:, None] - window
                mask = inside if mask is None else mask & inside
            found, of_slots = keys[slots].transpose(0, 1), values[slots].transpose(0, 1)
            if sinks is not None:  # as one more key
                found, of_slots = F.pad(found, (0, 0, 0, 1)), F.pad(of_slots, (0, 0, 0, 1))
                logits = q.new_zeros(count, len(slots))
                logits = logits if mask is None else logits.masked_fill(~mask, -torch.inf)
                added = sinks.to(q.dtype)[:, None, None].expand(-1, count, 1)
                mask = torch.cat((logits.expand(len(sinks), -1, -1), added), -1)
            attended = F.scaled_dot_product_attention(
                query[first:end].transpose(0, 1).unsqueeze(0),
                found.unsqueeze(0).to(q.dtype),
                of_slots.unsqueeze(0).to(q.dtype),
                attn_mask=mask,
                scale=layer.scaling,
                enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            )
            out[first:end] = attended[0].transpose(0, 1).reshape(count, -1)
            first, cell = end, cell + count * len(slots)
        return out


class CpuKVPool(MHATokenToKVPool):
    """SGLang's KV pool that moves accepted tokens in torch; the original launches a Triton kernel at start-up."""

    def _init_kv_copy_and_warmup(self) -> None:
        self._kv_copy_config = None

    def _move_kv_cache_impl(self, tgt_loc: torch.Tensor, src_loc: torch.Tensor) -> None:
        for buffer in (*self.k_buffer, *self.v_buffer):
            buffer[tgt_loc] = buffer[src_loc]
