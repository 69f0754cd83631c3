"""A `Controller` for the model that SGLang serves."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from freedraft.config import ConfigError
from freedraft.cost_model import CostModel
from freedraft.engines.sglang.source import SourceContext

if TYPE_CHECKING:
    from freedraft.controller import Controller

logger = logging.getLogger(__name__)


def make_controller(context: SourceContext, caps: CostModel, step_times: Path | None) -> Controller | None:
    """The controller of policy "auto"; None under the other policies, and, with one warning, where the model's
    configuration cannot be read: the rule of `caps` then decides."""
    if caps.policy != "auto":
        return None
    from freedraft.controller import Controller
    from freedraft.model_shape import ModelShape
    from freedraft.roofline import Roofline

    runner = context.target_worker.model_runner
    try:
        shape = ModelShape.from_config(runner.model_config.hf_config.to_dict(), dtype=str(runner.model_config.dtype))
    except ConfigError as error:
        logger.warning("freedraft: %s: policy 'knee' decides instead of 'auto'", error)
        return None
    roofline = Roofline(shape, caps.profile, runner.server_args.tp_size, mask=True)
    return Controller(caps, roofline, widths=context.widths, path=step_times)
