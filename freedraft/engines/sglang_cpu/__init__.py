"""`SGLANG_PLATFORM=freedraft_cpu` serves SGLang, speculation included, without a GPU. This is its entry point."""

import os
from typing import Any

NAME = "freedraft_cpu"
_ASSIGN_SLOTS = "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func"


def selected() -> bool:
    """Whether the user selected the CPU platform; it is never selected automatically."""
    return os.environ.get("SGLANG_PLATFORM", "").strip() == NAME


def activate() -> str | None:
    """SGLang's platform entry point: return the dotted path of the platform class, None if it is not selected."""
    if not selected():
        return None
    from freedraft.engines.sglang_cpu.torchvision_stand_in import install

    install()
    return "freedraft.engines.sglang_cpu.platform:CpuTreePlatform"


def register_platform() -> None:
    """Tree attention, and slots without Triton. Called when the first method is registered."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    @register_attention_backend("torch_native")
    def tree_attention(model_runner: Any) -> Any:
        from freedraft.engines.sglang_cpu.attention import TreeAttentionBackend

        return TreeAttentionBackend(model_runner)

    HookRegistry.register(_ASSIGN_SLOTS, assign_slots, HookType.REPLACE)


def choose_cpu(args: Any) -> None:
    """Set the platform's device before SGLang looks for one."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    if args.device is None and selected():
        declare_resolution(args, NAME, device="cpu")


def assign_slots(
    req_pool_indices: Any, req_to_token: Any, start_offset: Any, end_offset: Any, out_cache_loc: Any, batch_size: int
) -> None:
    """Set `req_to_token[row, start:end] = slots` for each of B requests; SGLang has this in Triton and for AMX only.
    out_cache_loc: [sum of (end - start)], the slots of all requests in order."""
    taken = 0
    for row, start, end in zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True):
        req_to_token[row, start:end] = out_cache_loc[taken : taken + end - start].to(req_to_token.dtype)
        taken += end - start
