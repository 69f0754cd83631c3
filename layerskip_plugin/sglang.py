"""Layer skipping in SGLang."""

from __future__ import annotations

from freedraft.engines.sglang.registration import register as register_method
from layerskip_plugin.method import SPEC


def register() -> None:
    """Entry point of `sglang.srt.plugins`: runs in every process of SGLang."""
    register_method(SPEC)
