"""Checks of arguments by shape, dtype and device: never by value, which would synchronise with the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def check_tensor(
    name: str, tensor: Tensor, shape: Sequence[int], dtypes: Sequence[torch.dtype], device: torch.device
) -> None:
    """Raise `ValueError` naming the argument unless it is a contiguous tensor of this shape, dtype and device."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a torch tensor, not {type(tensor).__name__}")
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {list(tensor.shape)}, expected {list(shape)}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} is {tensor.dtype}, expected {' or '.join(map(str, dtypes))}")
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}, the draft trees are on {device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous: pass {name}.contiguous()")
