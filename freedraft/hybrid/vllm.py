"""The hybrid method in vLLM."""

from __future__ import annotations

from freedraft.engines.vllm.methods import register as register_method
from freedraft.hybrid import SPEC


def register() -> None:
    """Entry point of `vllm.general_plugins`: runs in every process of vLLM."""
    register_method(SPEC)
