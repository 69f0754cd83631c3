"""Copies of the host's arrays on the device, for which the host does not wait."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def on_device(values: NDArray[Any], device: torch.device) -> torch.Tensor:
    """By way of pinned memory: from other memory the host would wait for the copy, and with it for the passes before
    it. On a CPU it is no copy."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    return host if device.type == "cpu" else host.pin_memory().to(device, non_blocking=True)
