"""Whether drafting is likely to pay on an engine, said at its start."""

from __future__ import annotations

from freedraft.config import ConfigError
from freedraft.cost.controller import roofline_of
from freedraft.cost.explain import BATCHES, TOKENS_PER_STEP, explain
from freedraft.cost.hardware import HardwareProfile
from freedraft.cost.yields import CHAIN_TOKENS_PER_STEP
from freedraft.method import EngineContext

TYPICAL_CONTEXT = 1024  # tokens of a request
WORTHWHILE = 1.05  # over plain decoding


def outlook(context: EngineContext, profile: HardwareProfile) -> str:
    """In a few words: how many requests at a time drafts of n-grams are likely to pay for, from the roofline alone and
    the acceptance of recorded chat answers."""
    try:
        roofline = roofline_of(context, profile)
    except ConfigError as error:
        return f"what a step costs is not known ({error})"
    chains = context.widths is None or context.chains
    curve = CHAIN_TOKENS_PER_STEP if chains else TOKENS_PER_STEP
    rows = explain(roofline, TYPICAL_CONTEXT, max_nodes=context.max_draft_tokens + 1, curve=curve)
    paying = [row for row in rows if row.speedup >= WORTHWHILE]
    if not paying:
        return f"it is not likely to pay, by the roofline of {profile.name}"
    most = paying[-1].batch
    bound = f"up to {most} requests at a time" if most < BATCHES[-1] else "at any number of requests at a time"
    first = f"{paying[0].speedup:.1f} times plain decoding at {paying[0].batch}"
    return f"it is likely to pay {bound} ({first}), by the roofline of {profile.name}"
