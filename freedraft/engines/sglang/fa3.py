"""Metadata of draft trees for SGLang's FlashAttention backend by one kernel, instead of 25 launches per step."""

from __future__ import annotations

from typing import Any

import torch
from freedraft_kernels import PagedKeys, write_tree_pages

from freedraft.engines.hooks import check
from freedraft.engines.sglang.hooks import FA3_HOOKS


def write_metadata_at_once(backend: Any) -> None:
    """Let `backend` prepare replays of trees by our kernel; no effect on other backends, on models with windows, and
    where this SGLang lacks what it takes. Call it after the capture of its CUDA graphs; it compiles the kernel."""
    captured = getattr(backend, "target_verify_metadata_topk_expand", {})
    sizes = [key for key in captured if isinstance(key, int)]
    if not sizes or backend.has_swa or check(FA3_HOOKS):
        return

    def write(bs: int, seq_lens: torch.Tensor, rows: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor) -> None:
        past, nodes = backend.target_verify_metadata_topk_normal[bs], captured[bs]
        keys = (PagedKeys(m.cache_seqlens_int32, m.cu_seqlens_k, m.page_table) for m in (past, nodes))
        write_tree_pages(mask, positions, seq_lens, rows, backend.req_to_token, *keys, page_size=backend.page_size)
        past.max_seq_len_k = backend.max_context_len
        backend.forward_metadata, backend.forward_metadata_spec_decode_expand = past, nodes

    def prepare(forward: Any, in_capture: bool = False) -> None:
        if in_capture or not forward.forward_mode.is_target_verify():
            return type(backend).init_forward_metadata_out_graph(backend, forward, in_capture)
        tree = forward.spec_info
        write(forward.batch_size, forward.seq_lens, forward.req_pool_indices, tree.custom_mask, tree.positions)

    none = torch.zeros(sizes[0], dtype=torch.int64, device=backend.req_to_token.device)
    write(sizes[0], none, none, none.bool(), none[:0])
    backend.init_forward_metadata_out_graph = prepare
