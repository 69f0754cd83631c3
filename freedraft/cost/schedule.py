"""Draft lengths by batch size, for engines that must know them beforehand: what the cost model expects to pay.

Where every request of a step verifies the same number of draft tokens, which the scheduler decides by the batch's size
alone (vLLM's `num_speculative_tokens_per_batch_size`), the length of the most expected tokens per second is taken from
the roofline; 0 is one of them.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from freedraft.config import ConfigError
from freedraft.cost.controller import roofline_of
from freedraft.cost.explain import expected_tokens
from freedraft.cost.hardware import choose_profile
from freedraft.cost.policies import Knee, Policy
from freedraft.method import EngineContext

CHAIN_TOKENS_PER_STEP = {1: 1.0, 2: 1.307, 3: 1.425, 5: 1.491, 9: 1.52, 17: 1.527, 33: 1.529}
"""Tokens per step by nodes: SSSD's chains on recorded answers of Llama-3.1-8B (bench/replay.py)."""
CONTEXT = 1024
"""Tokens of context per request that steps are priced at."""
LARGEST = 1 << 13
"""Batch size up to which lengths are told; larger ones have the last."""

Schedule = list[tuple[int, int, int]]
"""(first batch size, last batch size, draft tokens per request), ascending and without gaps."""


def draft_lengths(
    context: EngineContext, policy: Policy, *, hardware: str = "auto", knee: int | None = None
) -> Schedule | None:
    """Draft tokens per request by batch size; None where they are the same at every size.

    Args:
        policy, hardware, knee: as in `freedraft.cost.controller.make_controller`.

    Raises:
        ConfigError: `hardware` names no usable profile.
    """
    if policy == "fixed":
        return None
    profile, most = choose_profile(hardware), context.max_draft_tokens
    rule = Knee(profile, most, None, knee)
    roofline = None
    if policy == "auto":
        with suppress(ConfigError):  # as in `make_controller`: by the rule
            roofline = roofline_of(context, profile)
    nodes = np.arange(1, most + 2)
    schedule: Schedule = []
    first = 1
    while first <= LARGEST:
        last = 2 * first - 1
        batch = (first + last + 1) // 2
        if roofline is None:
            length = min(rule.max_tokens_per_request(batch), rule.speculation_length(batch) - 1)
        else:
            seconds = np.asarray(roofline.seconds(batch, batch * nodes.astype(np.float64), CONTEXT))
            length = int((expected_tokens(nodes, CHAIN_TOKENS_PER_STEP) / seconds).argmax())
        if schedule and schedule[-1][2] == length:
            schedule[-1] = schedule[-1][0], last, length
        else:
            schedule.append((first, last, length))
        first = last + 1
    return schedule if len(schedule) > 1 or schedule[0][2] < most else None
