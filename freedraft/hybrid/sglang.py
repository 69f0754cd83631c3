"""The hybrid method in SGLang."""

from __future__ import annotations

from freedraft.engines.sglang.registration import register as register_method
from freedraft.hybrid import SPEC


def register() -> None:
    """Entry point of `sglang.srt.plugins`: runs in every process of SGLang."""
    register_method(SPEC)
