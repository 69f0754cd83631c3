"""SSSD in SGLang."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from freedraft.engines.sglang.registration import register as register_method
from freedraft.method import EngineContext
from sssd_plugin.method import SPEC


def register() -> None:
    """Entry point of `sglang.srt.plugins`: runs in every process of SGLang."""
    register_method(SPEC, with_tokenizer)


def with_tokenizer(context: EngineContext, target_worker: Any) -> EngineContext:
    """SGLang's scheduler knows its tokenizer, unless it was told to skip it."""

    def fingerprint() -> str | None:
        from sssd_plugin.datastore import tokenizer

        return tokenizer.fingerprint(target_worker.tokenizer) if target_worker.tokenizer else None

    return replace(context, tokenizer_fingerprint=fingerprint)
