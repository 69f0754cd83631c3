"""SSSD in vLLM."""

from freedraft.engines.vllm.methods import register as register_method
from sssd_plugin.method import SPEC


def register() -> None:
    """Entry point of `vllm.general_plugins`: runs in every process of vLLM."""
    register_method(SPEC)
