"""A `Controller` for the model that vLLM serves."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from freedraft.config import ConfigError
from freedraft.cost_model import CostModel

if TYPE_CHECKING:
    from freedraft.controller import Controller

logger = logging.getLogger(__name__)


def make_controller(vllm_config: Any, caps: CostModel, step_times: Path | None) -> Controller | None:
    """The controller of policy "auto"; None under the other policies, and, with one warning, where the model's
    configuration cannot be read: the rule of `caps` then decides."""
    if caps.policy != "auto":
        return None
    from freedraft.controller import Controller
    from freedraft.model_shape import ModelShape
    from freedraft.roofline import Roofline

    model = vllm_config.model_config
    try:
        shape = ModelShape.from_config(model.hf_config.to_dict(), dtype=str(model.dtype))
    except ConfigError as error:
        logger.warning("freedraft: %s: policy 'knee' decides instead of 'auto'", error)
        return None
    tensor_parallel = vllm_config.parallel_config.tensor_parallel_size
    return Controller(caps, Roofline(shape, caps.profile, tensor_parallel), path=step_times)
