"""SSSD in SGLang."""

from freedraft.engines.sglang.registration import register as register_method
from sssd_plugin.method import SPEC


def register() -> None:
    """Entry point of `sglang.srt.plugins`: runs in every process of SGLang."""
    register_method(SPEC)
