"""Asynchronous copies of host arrays to the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def on_device(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Copy `values` through pinned memory: from pageable memory the host would wait for the copy, and for the passes
    before it. On a CPU nothing is copied."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
