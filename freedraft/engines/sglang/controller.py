"""A `Controller` for the model that SGLang serves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from freedraft.cost_model import CostModel
from freedraft.engines.sglang.source import SourceContext

if TYPE_CHECKING:
    from freedraft.cost.controller import Controller


def make_controller(context: SourceContext, caps: CostModel, step_times: Path | None) -> Controller | None:
    """See `freedraft.cost.controller.make_controller`; None under policies other than "auto"."""
    if caps.policy != "auto":
        return None
    from freedraft import controller

    runner = context.target_worker.model_runner
    return controller.make_controller(
        caps,
        runner.model_config.hf_config.to_dict(),
        dtype=str(runner.model_config.dtype),
        tensor_parallel=runner.server_args.tp_size,
        mask=True,
        widths=context.widths,
        path=step_times,
    )
