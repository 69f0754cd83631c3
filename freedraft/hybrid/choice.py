"""Which requests of a step get draft passes, at their price, and which keep the drafts that cost nothing.

Passes come before the step and are shared by all requests that take part. They draft several tokens at once, some of
which n-grams would have offered for free a step later: so their seconds must bring more tokens than seconds do on
average (`rate`). In the long run that step is the best with the most tokens - rate * seconds, where `rate` is what this
rule leads to (Dinkelbach).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from freedraft.cost.step_times import CENTRES
from freedraft.draft_pass import DraftPassEstimate

Floats = NDArray[np.float64]

MARGIN = 1.1  # gain required of passes over their time: the best of many estimates is estimated too high
MAX_SIZES = 32


class Choice(NamedTuple):
    """The choice that pays best."""

    rows: NDArray[np.intp]  # of the requests that get draft passes; none where n-grams alone pay better
    max_draft_len: int  # of their drafts
    rate: float  # expected tokens per second of the whole step


def sizes_up_to(count: int) -> NDArray[np.int64]:
    """Numbers of requests to consider: every one up to 32, then geometrically spaced."""
    if count <= MAX_SIZES:
        return np.arange(1, count + 1)
    return np.unique(np.geomspace(1, count, MAX_SIZES).round().astype(np.int64))


def poorest_first(p: Floats, kept: NDArray[np.int32], allowed: NDArray[np.bool_]) -> NDArray[np.intp]:
    """The requests that may get passes, those of the poorest n-gram drafts first; see `choose`."""
    gains = np.where(np.arange(p.shape[1]) < kept[:, None], p, 0.0).sum(1)
    rows = np.flatnonzero(allowed)
    return rows[np.argsort(gains[rows], kind="stable")]


def choose(
    p: Floats,
    kept: NDArray[np.int32],
    order: NDArray[np.intp],
    estimate: DraftPassEstimate,
    table: Floats,
    widths: NDArray[np.int32] | None = None,
    rate: float = 0.0,
    margin: float = MARGIN,
) -> Choice:
    """Which requests get draft passes: the first ones of `order`, as many as pay.

    Args:
        p: float64 [B, N], the chance that each node of the n-gram draft is accepted; 0 for padding.
        kept: int32 [B], nodes of it that are worth verifying, roots included.
        order: intp [R], the requests that may get passes (`poorest_first`).
        estimate: of passes over the first ones of `order`.
        table: seconds of the step by query tokens, at `CENTRES`.
        widths: see `Controller`: verification costs as many tokens for every request; None: as many as each has.
        rate: recent tokens per second of these requests; the larger of it and this step's estimate is used.
        margin: how much more than its time is worth a round of passes must bring.
    """
    batch, max_len = len(p), estimate.gain.shape[1]
    if widths is None:
        ways = [(np.where(np.arange(p.shape[1]) < kept[:, None], p, 0.0).sum(1), 0, max_len)]
    else:
        cumulative = p.cumsum(1)
        ways = [(cumulative[:, min(w, p.shape[1]) - 1], w, min(w - 1, max_len)) for w in widths.tolist()]
    nodes = np.maximum(kept - 1, 0).astype(np.float64)
    alone: list[tuple[float, float]] = []
    rounds: list[tuple[Floats, Floats, int]] = []
    for gains, width, longest in ways:
        query_tokens = batch * width if width else batch + nodes.sum()
        alone.append((float(batch + gains.sum()), float(np.interp(query_tokens, CENTRES, table))))
        if longest < 1 or not len(order):
            continue
        left = gains.sum() - gains[order].cumsum()[estimate.sizes - 1][:, None]
        tokens = batch + left + estimate.gain[:, :longest]
        if width:
            verified: Floats = np.array(float(batch * width))
        else:
            rest = nodes.sum() - nodes[order].cumsum()[estimate.sizes - 1][:, None]
            verified = batch + rest + estimate.tokens[:, :longest]
        seconds = np.interp(verified, CENTRES, table) + estimate.seconds[:, :longest]
        rounds.append((tokens, estimate.overrun * seconds, longest))
    rate = max(rate, max(tokens / seconds for tokens, seconds in alone))
    tokens_alone, seconds_alone = max(alone, key=lambda way: way[0] - rate * way[1])
    # What a round brings beyond n-grams has to beat what its seconds would bring elsewhere.
    # Where passes shorten the step, the seconds that they save count for less by as much.
    more = [s - seconds_alone for _, s, _ in rounds]
    pays = [
        t - tokens_alone > rate * np.maximum(margin * m, m / margin) for (t, _, _), m in zip(rounds, more, strict=True)
    ]
    rate = max([rate, *(float((t / s)[these].max(initial=0.0)) for (t, s, _), these in zip(rounds, pays, strict=True))])
    best, choice = -np.inf, Choice(np.zeros(0, np.intp), 0, rate)
    for (t, s, longest), these in zip(rounds, pays, strict=True):
        surplus = np.where(these, t - rate * s, -np.inf).max(1)
        k = int(surplus.argmax())
        if surplus[k] > best:
            # A policy stops by itself where a draft ends to pay, so that more than the best length may be allowed.
            best, choice = float(surplus[k]), Choice(order[: estimate.sizes[k]], longest, rate)
    return choice
