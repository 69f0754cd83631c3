"""Predictions of the cost model for a model on some hardware: step times and draft lengths by batch size."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from freedraft.config import ConfigError
from freedraft.cost.controller import Knee
from freedraft.cost.priors import CHAIN_TOKENS_PER_STEP, TOKENS_PER_STEP, expected_tokens
from freedraft.cost.roofline import Roofline

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CURVES = {"chain": CHAIN_TOKENS_PER_STEP, "tree": TOKENS_PER_STEP}


def parse_curve(text: str) -> dict[int, float]:
    """ "4:1.5,8:1.7" as {4: 1.5, 8: 1.7}, with one token at one node. Raises ConfigError: no such pairs, or tokens
    that fall or exceed the nodes."""
    try:
        pairs = {int(nodes): float(tokens) for nodes, tokens in (part.split(":") for part in text.split(","))}
    except ValueError:
        raise ConfigError(f"--tokens-per-step '{text}': write NODES:TOKENS pairs, as in 4:1.5,8:1.7") from None
    curve = dict(sorted(({1: 1.0} | pairs).items()))
    tokens = list(curve.values())
    if any(not 1 <= t <= n for n, t in curve.items()) or tokens != sorted(tokens):
        raise ConfigError(f"--tokens-per-step '{text}': tokens must grow with the nodes, from 1 to as many")
    return curve


@dataclass(frozen=True, slots=True)
class Row:
    """One batch size. Times in seconds, lengths in nodes per request, root included.

    Attributes:
        plain: step time without drafts.
        rule: the paper's s_q = I_knee / b, with the profile's caps; rule_seconds: a step of it.
        best: the length of the most tokens per second; best_seconds: a step of it; speedup: over plain.
    """

    batch: int
    plain: float
    rule: int
    rule_seconds: float
    best: int
    best_seconds: float
    speedup: float


def explain(
    roofline: Roofline, context: int, *, max_nodes: int = 64, curve: dict[int, float] | None = None
) -> list[Row]:
    """Step time and speculation length by batch size. context: tokens per request. max_nodes: longest length
    considered; curve: tokens per step by nodes, interpolated linearly in the logarithm of the nodes."""
    rows = []
    lengths = np.arange(1, max_nodes + 1)
    tokens = expected_tokens(lengths, curve or TOKENS_PER_STEP)
    rule = Knee(roofline.profile, max_nodes - 1, knee=roofline.profile.ridge_of(roofline.shape.weight_bytes))
    for batch in BATCHES:
        seconds = np.asarray(roofline.seconds(batch, batch * lengths.astype(np.float64), context))
        best = int((tokens / seconds).argmax())
        chosen = rule.length(batch) + 1
        rows.append(
            Row(batch, float(seconds[0]), chosen, float(seconds[chosen - 1]), best + 1, float(seconds[best]),
                float(tokens[best] / seconds[best] * seconds[0]))
        )  # fmt: skip
    return rows
