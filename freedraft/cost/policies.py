"""The controller of a policy; and draft lengths by batch size that the cost model expects to pay (possibly 0), for
engines that decide them before drafting (vLLM's `num_speculative_tokens_per_batch_size`)."""

import logging
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from freedraft.config import ConfigError
from freedraft.cost.auto import Auto
from freedraft.cost.auto_by_batch import BatchLengths, Rows, candidate_lengths
from freedraft.cost.controller import Controller, DrafterDecides, FullLength, Knee, Policy
from freedraft.cost.hardware import choose_profile
from freedraft.cost.measured import Head, Measured
from freedraft.cost.roofline import knee_of, roofline_of
from freedraft.step import EngineContext

logger = logging.getLogger(__name__)

CONTEXT = 1024  # context per request, tokens, for step times
LARGEST = 1 << 13  # Largest batch size with its own entry; larger batches use the last entry


class Schedule(NamedTuple):
    rows: Rows  # ascending, without gaps
    learnt: tuple[int, ...] = ()  # lengths to choose from while serving, ascending; none if `rows` are final


def make_controller(
    context: EngineContext, policy: Policy = "auto", *, hardware: str = "auto", knee: int | None = None,
    step_times: Path | None = None, drafter_decides: bool = False,
) -> Controller:  # fmt: skip
    """The controller of a policy, for an engine. Where the model's configuration cannot be read, "knee" decides instead
    of "auto", with one warning.

    Args:
        hardware: name or file of a profile, or "auto".
        knee: of policy "knee"; replaces the profile's ridge.
        step_times: of policy "auto": file to keep the step times in.
        drafter_decides: of policy "auto": the drafter decides how much it drafts.

    Raises:
        ConfigError: `hardware` names no usable profile.
    """
    profile, most, widths = choose_profile(hardware, context.device), context.max_draft_tokens, context.widths
    if policy == "fixed" or (context.lengths is not None and (policy != "auto" or len(context.lengths) == 1)):
        return FullLength(profile, most, widths)  # the engine's table of lengths has the knee, if that decides
    if policy == "auto":
        head = Head(context.head) if context.head else None
        try:
            measured = Measured(roofline_of(context, profile), step_times)
            if context.lengths is not None:
                return BatchLengths(measured, context.lengths, head)
            return (DrafterDecides if drafter_decides else Auto)(profile, most, widths, measured, head)
        except ConfigError as error:
            logger.warning("freedraft: %s: policy 'knee' decides instead of 'auto'", error)
    return Knee(profile, most, widths, knee or knee_of(context, profile))


def draft_lengths(
    context: EngineContext, policy: Policy, *, hardware: str = "auto", knee: int | None = None
) -> Schedule | None:
    """Draft tokens per request by batch size; None if one fixed number is used. Other arguments, and errors: see
    `make_controller`."""
    if policy == "fixed":
        return None
    profile, max_tokens = choose_profile(hardware, context.device), context.max_draft_tokens
    rule = Knee(profile, max_tokens, None, knee or knee_of(context, profile))
    model: BatchLengths | None = None
    if policy == "auto":
        with suppress(ConfigError):  # as in `make_controller`: the knee decides
            head = Head(context.head) if context.head else None
            lengths = context.lengths or candidate_lengths(max_tokens)
            model = BatchLengths(Measured(roofline_of(context, profile)), lengths, head)
    rows: Rows = []
    first = 1
    while first <= LARGEST:
        last, batch = 2 * first - 1, first + first // 2
        length = model.best(model.seconds(batch, CONTEXT)) if model else max(rule.length(batch), context.head)
        if rows and rows[-1][2] == length:
            rows[-1] = rows[-1][0], last, length
        else:
            rows.append((first, last, length))
        first = last + 1
    learnt = tuple(model.lengths.tolist()) if model else ()
    return Schedule(rows, learnt) if learnt or len(rows) > 1 or rows[0][2] < max_tokens else None
