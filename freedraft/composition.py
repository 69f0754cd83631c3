"""Two drafters in one step: which requests the model drafts for itself, at the price of passes, and which n-grams do.

n-grams cost nothing, so every request has their draft first. Drafting with the model's own layers takes passes before
the step, shared by all requests that take part. A step yields the expected tokens of all its drafts in the seconds of
the passes and of verification. Passes draft several tokens at once, some of which n-grams would have offered for free
a step later: so their seconds must bring more tokens than seconds do on average (`rate`). In the long run that step is
the best with the most tokens - rate * seconds, where `rate` is what this rule leads to (Dinkelbach).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from freedraft.step_times import CENTRES

Floats = NDArray[np.float64]

MARGIN = 1.1
"""By how much what passes bring must exceed what their time is worth: the best of many guesses is guessed too high."""
_SIZES = 32


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a round of draft passes would bring and take, by the most tokens m = 1 .. M that a draft may have.

    Attributes:
        batches: int64 [K], numbers of requests, ascending.
        gain: float64 [M], accepted tokens per request.
        tokens: float64 [M], draft tokens per request.
        seconds: float64 [K, M], of the passes over so many requests.
    """

    batches: NDArray[np.int64]
    gain: Floats
    tokens: Floats
    seconds: Floats


@dataclass(frozen=True, slots=True)
class Choice:
    """What pays best.

    Attributes:
        rows: intp [k], the requests that get draft passes; none where n-grams alone pay better.
        most: the most tokens a draft of theirs may have.
        rate: expected tokens per second of the whole step.
    """

    rows: NDArray[np.intp]
    most: int
    rate: float


def sizes(count: int) -> NDArray[np.int64]:
    """Numbers of requests to consider out of so many: all, or 32 of them, ever further apart."""
    if count <= _SIZES:
        return np.arange(1, count + 1)
    return np.unique(np.geomspace(1, count, _SIZES).round().astype(np.int64))


def choose(
    p: Floats,
    kept: NDArray[np.int32],
    allowed: NDArray[np.bool_],
    outlook: Outlook,
    table: Floats,
    widths: Sequence[int] | NDArray[np.int32] | None = None,
    rate: float = 0.0,
    margin: float = MARGIN,
) -> Choice:
    """Which requests get draft passes: those from whose n-grams the least is expected, as many as pay.

    Args:
        p: float64 [B, N], the chance that each node of the n-gram draft is accepted; 0 for what is none.
        kept: int32 [B], nodes of it that are worth verifying, roots included.
        allowed: bool [B], requests that may get passes.
        outlook: of passes over 1 .. as many requests as are allowed (see `sizes`).
        table: seconds of the step by query tokens, at `CENTRES`.
        widths: see `Controller`: verification costs as many tokens for every request; None: as many as each has.
        rate: tokens per second of these requests of late; where this step alone promises more, that counts.
        margin: how much more than its time is worth a round of passes must bring.
    """
    batch = len(p)
    candidates = np.flatnonzero(allowed)
    if widths is None:
        ways = [(np.where(np.arange(p.shape[1]) < kept[:, None], p, 0.0).sum(1), 0, len(outlook.gain))]
    else:
        cumulative = p.cumsum(1)
        ways = [(cumulative[:, min(w, p.shape[1]) - 1], w, min(w - 1, len(outlook.gain))) for w in widths]
    nodes = np.maximum(kept - 1, 0).astype(np.float64)
    drafted = nodes.sum()
    alone: list[tuple[float, float]] = []
    rounds: list[tuple[Floats, Floats, NDArray[np.intp], int]] = []
    for gains, width, longest in ways:
        total = gains.sum()
        query_tokens = batch * width if width else batch + drafted
        alone.append((float(batch + total), float(np.interp(query_tokens, CENTRES, table))))
        if not len(candidates) or longest < 1:
            continue
        order = candidates[np.argsort(gains[candidates], kind="stable")]
        k = outlook.batches[:, None]
        left = total - gains[order].cumsum()[outlook.batches - 1][:, None]
        tokens = batch + left + k * outlook.gain[:longest]
        if width:
            verified: Floats = np.array(float(batch * width))
        else:
            rest = drafted - nodes[order].cumsum()[outlook.batches - 1][:, None]
            verified = batch + rest + k * outlook.tokens[:longest]
        seconds = np.interp(verified, CENTRES, table) + outlook.seconds[:, :longest]
        rounds.append((tokens, seconds, order, longest))
    rate = max(rate, max(tokens / seconds for tokens, seconds in alone))
    tokens_alone, seconds_alone = max(alone, key=lambda way: way[0] - rate * way[1])
    # What a round brings beyond n-grams has to beat what its seconds would bring elsewhere.
    pays = [t - tokens_alone > margin * rate * (s - seconds_alone) for t, s, _, _ in rounds]
    if not any(these.any() for these in pays):
        return Choice(np.zeros(0, np.intp), 0, rate)
    rate = max(
        rate, max(float((t / s)[these].max(initial=0.0)) for (t, s, _, _), these in zip(rounds, pays, strict=True))
    )
    best, choice = -np.inf, Choice(np.zeros(0, np.intp), 0, rate)
    for (t, s, order, longest), these in zip(rounds, pays, strict=True):
        surplus = np.where(these, t - rate * s, -np.inf)
        i = int(surplus.max(1).argmax())
        if surplus[i].max() > best:
            # A policy stops by itself where a draft ends to pay, so that more than the best length may be allowed.
            best, choice = float(surplus[i].max()), Choice(order[: outlook.batches[i]], longest, rate)
    return choice
