"""SGLang on any CPU, in plain torch: stock SGLang needs the AMX build of its kernels and verifies no trees there."""

from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform


def verify_cache_locs(
    *, req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, start_offset: torch.Tensor,
    end_offset: torch.Tensor, batch_size: int, draft_token_num: int, device: Any,
) -> torch.Tensor:  # fmt: skip
    """Return the KV slots of the nodes to verify, int64 [B * draft_token_num]. req_pool_indices: [B], rows of
    `req_to_token` (int32 [rows, max context]); start_offset: [B], position of each request's first node."""
    positions = start_offset.to(torch.int64)[:, None] + torch.arange(draft_token_num, device=start_offset.device)
    return req_to_token[req_pool_indices.to(torch.int64)[:, None], positions].reshape(-1).to(torch.int64)


class CpuTreePlatform(CpuDeviceMixin, SRTPlatform):
    """Out-of-tree platform selected by `SGLANG_PLATFORM=freedraft_cpu`."""

    _enum = PlatformEnum.OOT

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def get_speculative_cache_locs_fn(self) -> Any:
        return verify_cache_locs

    def support_mamba_cache_extra_buffer(self) -> bool:
        return True

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        if kind != "mha":
            return None
        # Imported here: SGLang resolves the platform while its own modules are only partly imported.
        from freedraft.engines.sglang_cpu.attention import CpuKVPool

        return CpuKVPool
