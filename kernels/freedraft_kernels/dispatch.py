"""Chooses the implementation of an operation: Triton or the torch reference."""

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
    """Whether to run Triton: on CUDA, or anywhere in its interpreter. `backend` "triton" must not be asked for
    elsewhere."""
    possible = has_triton() and (device.type == "cuda" or interpreting())
    assert possible or backend != "triton", "Triton cannot run here: set TRITON_INTERPRET=1"
    return possible and backend != "reference"
