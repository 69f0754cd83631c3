"""The name of a machine, so that times measured on one are not believed on another."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def hardware(device: str = "cpu") -> str:
    """The processor behind `device` ("cpu", "cuda", "cuda:1"), in words."""
    if device.startswith("cuda"):
        import torch

        return str(torch.cuda.get_device_name(device))
    name = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        models = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        name = models[0] if models else name
    return f"{name}, {os.cpu_count()} CPUs"
