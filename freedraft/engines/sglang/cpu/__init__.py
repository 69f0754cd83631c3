"""`SGLANG_PLATFORM=freedraft_cpu` serves SGLang, speculation included, without a GPU. This is its entry point."""

from __future__ import annotations

import os

NAME = "freedraft_cpu"


def selected() -> bool:
    """Whether the user asked for the CPU platform. It is never chosen by itself."""
    return os.environ.get("SGLANG_PLATFORM", "").strip() == NAME


def activate() -> str | None:
    """SGLang's platform entry point: dotted path of the platform class, or None when it was not asked for."""
    if not selected():
        return None
    from freedraft.engines.sglang.cpu.torchvision_stand_in import install

    install()
    return "freedraft.engines.sglang.cpu.platform:CpuTreePlatform"
