"""Whether drafting is likely to pay on an engine, said at its start."""

from __future__ import annotations

from collections.abc import Sequence

from freedraft.config import ConfigError
from freedraft.cost.explain import BATCHES, CHAIN_TOKENS_PER_STEP, TOKENS_PER_STEP, explain
from freedraft.cost.hardware import HardwareProfile
from freedraft.cost.roofline import roofline_of
from freedraft.draft_pass import Recipe
from freedraft.step import EngineContext

TYPICAL_CONTEXT = 1024  # tokens of a request
WORTHWHILE = 1.05  # over plain decoding
LOADS = ((1, TYPICAL_CONTEXT), (16, 16 * TYPICAL_CONTEXT))  # requests, tokens of each


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


def outlook_of_passes(context: EngineContext, profile: HardwareProfile, recipes: Sequence[Recipe]) -> str:
    """In a few words: what a draft pass takes of a step, which is what must be accepted of its tokens, by the roofline,
    with the one of these recipes that takes least."""
    try:
        roofline = roofline_of(context, profile)
    except ConfigError as error:
        return f"what a step costs is not known ({error})"
    shares = []
    for batch, tokens in LOADS:
        least = min(float(roofline.pass_seconds(recipe, batch, tokens)) for recipe in recipes)
        share = least / float(roofline.seconds(batch, batch, tokens))
        shares.append(f"{share:.0%} of a step of {batch} of {tokens:,} tokens")
    return (
        f"a draft pass takes about {' and '.join(shares)}, by the roofline of {profile.name}, and pays where a larger "
        "share of its tokens is accepted"
    )
