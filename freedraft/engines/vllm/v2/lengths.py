"""Draft lengths on their way from the worker that learns them to vLLM's scheduler, with the output of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from freedraft.cost.batch_lengths import Rows
from freedraft.engines.vllm.patching import wrap_once

LENGTHS = "_freedraft_lengths"  # Attribute of vLLM's ModelRunnerOutput


def send_lengths(output: Any, rows: Rows) -> None:
    """Add them to vLLM's AsyncOutput."""
    if (model_runner_output := getattr(output, "model_runner_output", None)) is not None:
        setattr(model_runner_output, LENGTHS, rows)


def receive_lengths() -> None:
    """Make the scheduler use what comes: its table of draft lengths by batch size."""
    from vllm.v1.core.sched.scheduler import Scheduler

    wrap_once(Scheduler, "update_from_output", _update)


def _update(original: Callable[..., Any]) -> Callable[..., Any]:
    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any, *args: Any, **kw: Any) -> Any:
        table = self.dynamic_sd_lookup
        for first, last, length in getattr(model_runner_output, LENGTHS, ()) if table else ():
            last = min(last, len(table) - 1)
            table[first : last + 1] = [length] * (last + 1 - first)
        return original(self, scheduler_output, model_runner_output, *args, **kw)

    return update_from_output
