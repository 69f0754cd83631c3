"""Attention backends of vLLM that GPUs have, on this CPU: a plugin of vLLM, for all its processes.

For processes that have this folder on PYTHONPATH and INTERPRETED_ATTENTION=triton or flash. Triton's kernels run in the
interpreter; what FlashAttention's compute is computed by PyTorch.
"""

import os
from itertools import pairwise

import torch
from torch.nn.functional import scaled_dot_product_attention


def attend(q, k, v, out, cu_seqlens_q, seqused_k, softmax_scale, block_table, **_):
    """Causal attention, as both stock kernels compute it: the queries of a request are its last tokens."""
    for row, (start, end) in enumerate(pairwise(cu_seqlens_q.tolist())):
        if start == end:  # a request that fills a graph up
            continue
        length = int(seqused_k[row])
        keys, values = (x[block_table[row].long()].flatten(0, 1)[:length].transpose(0, 1) for x in (k, v))
        mask = torch.ones(end - start, length, dtype=torch.bool).tril(length - (end - start))
        attended = scaled_dot_product_attention(
            q[start:end].transpose(0, 1), keys, values, mask, scale=softmax_scale, enable_gqa=True
        )
        out[start:end] = attended.transpose(0, 1)


def write(key, value, keys, values, slots, *_):
    """Keys and values into their slots of a paged cache; those without a slot nowhere."""
    rows = (slots >= 0).nonzero()[:, 0]
    pages, places = slots[rows] // keys.shape[1], slots[rows] % keys.shape[1]
    keys[pages, places], values[pages, places] = key[rows], value[rows]


def attend_by(name):
    """Instead of the backend of vLLM's CPU platform."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    torch.cuda.get_device_capability = lambda *_: (9, 0)
    if name == "flash":
        from vllm.v1.attention.backends import flash_attn

        flash_attn._FA4_DENSE_ATTENTION_KERNEL, flash_attn.reshape_and_cache_flash = attend, write
        flash_attn.get_flash_attn_version = lambda *_, **__: 2
    backend = AttentionBackendEnum.FLASH_ATTN if name == "flash" else AttentionBackendEnum.TRITON_ATTN
    platform = type(current_platform)
    platform.get_attn_backend_cls = classmethod(lambda *_, **__: backend.get_path())


def install():
    if name := os.environ.get("INTERPRETED_ATTENTION"):
        attend_by(name)
