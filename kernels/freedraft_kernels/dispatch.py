"""Chooses the implementation of an operation: Triton or the torch reference."""

from __future__ import annotations

import functools
import importlib.util
import os
from typing import Literal

import torch

Backend = Literal["auto", "triton", "reference"]


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """Whether Triton kernels run in its interpreter. The variable must be set before Triton is first imported."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on")


def use_triton(device: torch.device, backend: Backend = "auto") -> bool:
    """Whether to run Triton: on CUDA, or anywhere in its interpreter. Raises ValueError: an unknown `backend`, or
    Triton is requested where it cannot run."""
    possible = has_triton() and (device.type == "cuda" or interpreting())
    if backend in ("auto", "reference"):
        return possible and backend == "auto"
    if backend != "triton":
        raise ValueError(f"backend is {backend!r}: use 'auto', 'triton' or 'reference'")
    if not has_triton():
        raise ValueError("backend 'triton' was asked for but triton is not installed: use 'auto' or 'reference'")
    if not possible:
        raise ValueError(f"triton cannot run on a {device.type} tensor: use 'auto', or set TRITON_INTERPRET=1")
    return True
