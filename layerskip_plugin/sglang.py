"""Layer skip in SGLang, which verifies trees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from freedraft.engines.sglang.registration import register as register_method
from freedraft.method import EngineContext
from layerskip_plugin.method import SPEC


def register() -> None:
    """Entry point of `sglang.srt.plugins`: runs in every process of SGLang."""
    register_method(SPEC, with_hardware)


def with_hardware(context: EngineContext, target_worker: Any) -> EngineContext:
    """What the scheduler computes with, as `freedraft calibrate` writes it."""
    from layerskip_plugin.selection.hardware import hardware

    return replace(context, hardware=hardware(str(target_worker.model_runner.device)))
