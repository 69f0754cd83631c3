"""Patches of vLLM's scheduler: KV slots for drafts, and the tenant of a request."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from freedraft.engines.vllm.patching import MARK
from freedraft.tenants import tenant_key

SALT = "freedraft_salt"  # Attribute of vLLM's NewRequestData: the key of the request's tenant


def add_salt(data: Any, request: Any, *args: Any, **kwargs: Any) -> None:
    """After `NewRequestData.from_request`: pass the tenant to the model runner. vLLM's prefix cache knows adapters by
    name and path, too."""
    lora = request.lora_request
    adapter = (lora.lora_name, lora.lora_path) if lora else ()
    if key := tenant_key(request.cache_salt, None, *adapter):
        setattr(data, SALT, key)


def reserve_slots(runs_model: Callable[[Any], bool]) -> None:
    """Make `VllmConfig.num_lookahead_tokens` include drafts of methods that run the model. Safe to call repeatedly.

    vLLM reserves slots past the scheduled tokens for its own drafters that run a model, and none for custom ones. The
    scheduler and the worker's warm-up both read this property, so replacing it keeps them in agreement.

    Args:
        runs_model: whether a VllmConfig's method is one of ours that runs the model.
    """
    from vllm.config import VllmConfig

    original = VllmConfig.__dict__["num_lookahead_tokens"]
    if hasattr(original.fget, MARK):
        return

    def num_lookahead_tokens(self: Any) -> int:
        config = self.speculative_config
        if config is not None and config.method in ("custom_class", "ngram_gpu") and runs_model(self):
            # A draft of k tokens writes the KV of the last sampled token and of its first k - 1 tokens: k slots past
            # the computed ones, which the scheduler's own count does not include.
            return config.num_speculative_tokens
        return original.fget(self)

    setattr(num_lookahead_tokens, MARK, original.fget)
    setattr(VllmConfig, "num_lookahead_tokens", property(num_lookahead_tokens, doc=original.__doc__))  # noqa: B010
