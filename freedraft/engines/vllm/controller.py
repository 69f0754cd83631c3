"""A `Controller` for the model that vLLM serves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from freedraft.cost_model import CostModel

if TYPE_CHECKING:
    from freedraft.cost.controller import Controller


def make_controller(vllm_config: Any, caps: CostModel, step_times: Path | None) -> Controller | None:
    """See `freedraft.cost.controller.make_controller`; None under policies other than "auto"."""
    if caps.policy != "auto":
        return None
    from freedraft import controller

    model = vllm_config.model_config
    return controller.make_controller(
        caps,
        model.hf_config.to_dict(),
        dtype=str(model.dtype),
        tensor_parallel=vllm_config.parallel_config.tensor_parallel_size,
        path=step_times,
    )
