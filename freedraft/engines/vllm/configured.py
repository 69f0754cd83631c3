"""`Configured`: what vLLM's configuration carries of a method of ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

ATTRIBUTE = "_freedraft"  # Of a SpeculativeConfig, which holds it
ADAPTIVE = "enable_adaptive_verification"
SCHEDULE = "num_speculative_tokens_per_batch_size"


@dataclass(frozen=True)
class Configured:
    """What a SpeculativeConfig carries of ours. lengths: draft tokens per request that model runner V2 chooses from
    while serving; none where it does not; graph_mode_given: whether the user has chosen a mode of CUDA graphs."""

    name: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    lengths: tuple[int, ...] = ()
    graph_mode_given: bool = False


def configured(vllm_config: Any) -> Configured:
    """What `create_speculative_config` has passed on; name "" where the method is not ours."""
    return getattr(getattr(vllm_config, "speculative_config", None), ATTRIBUTE, Configured())
