"""`Configured`: our method's name and options, carried by vLLM's configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ATTRIBUTE = "_freedraft"  # attribute of SpeculativeConfig that holds a `Configured`
ADAPTIVE = "enable_adaptive_verification"
SCHEDULE = "num_speculative_tokens_per_batch_size"


@dataclass(frozen=True)
class Configured:
    """Our data in a SpeculativeConfig. lengths: draft tokens per request that model runner V2 chooses from while
    serving, or none; graph_mode_given: whether the user has set a CUDA graph mode; shape: of drafts on model runner V2,
    "chain", "tree", or "auto" for trees if attention verifies them in all its steps."""

    name: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()
    graph_mode_given: bool = False
    shape: str = "chain"


def configured(vllm_config: Any) -> Configured:
    """The `Configured` that `create_speculative_config` attached; name "" if the method is not ours."""
    return getattr(getattr(vllm_config, "speculative_config", None), ATTRIBUTE, Configured())
