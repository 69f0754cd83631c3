"""vLLM's Triton attention backend, which GPUs can have, on this CPU: a plugin of vLLM, for all its processes.

For processes that have this folder on PYTHONPATH and INTERPRETED_ATTENTION=triton.
"""

from __future__ import annotations

import os


def attend_by_triton() -> None:
    """Instead of the backend of vLLM's CPU platform."""
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    torch.cuda.get_device_capability = lambda *_: (9, 0)
    platform = type(current_platform)
    platform.get_attn_backend_cls = classmethod(lambda *_, **__: AttentionBackendEnum.TRITON_ATTN.get_path())


def install() -> None:
    if os.environ.get("INTERPRETED_ATTENTION") == "triton":
        attend_by_triton()
