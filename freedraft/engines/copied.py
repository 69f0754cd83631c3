"""`Copied`: a tensor on its way from the device to the host."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray


class Copied(NamedTuple):
    host: torch.Tensor
    done: Any  # event behind the copy; None for a tensor that was on the host

    def arrived(self) -> bool:
        return self.done is None or bool(self.done.query())

    def wait(self) -> NDArray[Any]:
        if self.done is not None:
            self.done.synchronize()
        return self.host.numpy()


def to_host(values: torch.Tensor) -> Copied:
    """Start the copy, behind the device's work so far; later work may overwrite `values`. On a CPU nothing is
    copied."""
    if values.device.type == "cpu":
        return Copied(values, None)
    # Torch keeps pinned memory by powers of two of its size, and uses it again.
    host = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
    done = torch.Event(values.device)
    done.record()
    return Copied(host, done)
