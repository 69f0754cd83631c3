"""Tree attention for the CPU platform: SGLang's torch backend with TARGET_VERIFY added."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc


class TreeAttentionBackend(TorchNativeAttnBackend):
    """Attention by torch's SDPA over the paged pool, with a tree mask when draft trees are verified."""

    needs_cpu_seq_lens = True

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        if self.use_sliding_window_kv_pool:
            raise ValueError(
                "the freedraft CPU platform has no pool for sliding windows: add --disable-hybrid-swa-memory"
            )

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        self._masks: dict[int, list[torch.Tensor | None]] = {}  # of a pass, by window

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        if not forward_batch.forward_mode.is_target_verify():
            return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        spec, batch = forward_batch.spec_info, forward_batch.batch_size
        nodes = spec.draft_token_num
        query = q.view(batch, nodes, layer.tp_q_head_num, layer.qk_head_dim).transpose(1, 2)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        slots_of = self.req_to_token_pool.req_to_token
        window = layer.sliding_window_size if layer.sliding_window_size is not None else -1
        masks = self._masks.get(window) or self._masks.setdefault(window, tree_masks(forward_batch, window))
        out = q.new_empty(batch, nodes, layer.tp_q_head_num * layer.v_head_dim)
        for i, (row, length) in enumerate(
            zip(forward_batch.req_pool_indices.tolist(), forward_batch.seq_lens.tolist(), strict=True)
        ):
            # In the request's row, the slots of the nodes follow those of the cached tokens.
            slots = slots_of[row, : length + nodes]
            attended = F.scaled_dot_product_attention(
                query[i : i + 1],
                keys[slots].transpose(0, 1).unsqueeze(0).to(q.dtype),
                values[slots].transpose(0, 1).unsqueeze(0).to(q.dtype),
                attn_mask=masks[i],
                scale=layer.scaling,
                enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            )
            out[i] = attended[0].transpose(0, 1).reshape(nodes, -1)
        return out.view(batch * nodes, -1)


def tree_masks(forward_batch: Any, window: int) -> list[torch.Tensor | None]:
    """Return the mask of each request of a verification pass with n nodes, bool [n, tokens + n]; None where a single
    node sees all tokens, as in plain decoding. window: tokens before a node that it sees; -1 for all."""
    nodes = forward_batch.spec_info.draft_token_num
    lengths, masks = forward_batch.seq_lens.tolist(), []
    if nodes == 1 and window < 0:
        return [None] * len(lengths)
    tree = forward_batch.spec_info.custom_mask.view(-1, nodes, nodes)
    for i, (length, positions) in enumerate(zip(lengths, forward_batch.positions.view(-1, nodes), strict=True)):
        mask = torch.cat((tree.new_ones(nodes, length), tree[i]), 1)
        if window > -1:
            at = torch.cat((torch.arange(length), positions))
            mask &= at >= positions[:, None] - window
        masks.append(mask)
    return masks
