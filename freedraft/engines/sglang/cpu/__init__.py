"""`SGLANG_PLATFORM=freedraft_cpu` serves SGLang, speculation included, without a GPU. This is its entry point."""

from __future__ import annotations

import os

NAME = "freedraft_cpu"


def selected() -> bool:
    """Whether the user selected the CPU platform; it is never selected automatically."""
    return os.environ.get("SGLANG_PLATFORM", "").strip() == NAME


def activate() -> str | None:
    """SGLang's platform entry point: return the dotted path of the platform class, None if it is not selected."""
    if not selected():
        return None
    from freedraft.engines.sglang.cpu.torchvision_stand_in import install

    install()
    return "freedraft.engines.sglang.cpu.platform:CpuTreePlatform"
