"""Which nodes of a batch of drafts are verified: the likeliest ones, as many as a step has time for (compiled)."""

from __future__ import annotations

import numpy as np

from freedraft.compiled import compiled
from freedraft.cost.step_times import at

FREE = -1  # No forced number of tokens
_RANK_BINS = 256


@compiled(nogil=True)
def _rank(p, counts, order):
    """Probabilities of all draft nodes into `order`, falling: sorted roughly by bins, then by insertion."""
    place = np.zeros(_RANK_BINS + 1, np.int32)
    for b in range(len(counts)):
        for i in range(1, counts[b]):
            place[_RANK_BINS - int(p[b, i] * (_RANK_BINS - 1))] += 1
    for k in range(_RANK_BINS):
        place[k + 1] += place[k]
    total = place[_RANK_BINS]
    for b in range(len(counts)):
        for i in range(1, counts[b]):
            k = _RANK_BINS - 1 - int(p[b, i] * (_RANK_BINS - 1))
            order[place[k]] = p[b, i]
            place[k] += 1
    for k in range(1, total):
        v, i = order[k], k
        while i > 0 and order[i - 1] < v:
            order[i] = order[i - 1]
            i -= 1
        order[i] = v
    return total


@compiled(nogil=True)
def _keep(p, counts, order, n):
    """Truncate the drafts to the n first nodes of `order`; the nodes kept of the longest draft."""
    threshold = order[n - 1] if n > 0 else 2.0
    ties = 0  # nodes just as likely as the last one kept, that are kept
    for i in range(n):
        if order[i] == threshold:
            ties += 1
    longest = 1
    for b in range(len(counts)):
        kept = min(counts[b], 1)
        for i in range(1, counts[b]):
            if p[b, i] > threshold:
                kept = i + 1
            elif p[b, i] == threshold and ties > 0:
                ties -= 1
                kept = i + 1
            else:
                break
        counts[b] = kept
        longest = max(longest, kept)
    return longest


@compiled(nogil=True)
def allocate(p, counts, n, order):
    """Truncate the drafts to the n likeliest nodes of the batch, or to all where there are fewer.

    Args:
        p: [B, N], probability of every node, falling from node to node.
        counts: int32 [B], in: nodes drafted, out: nodes kept.
        order: float64 [>= B * N], scratch.

    Returns:
        Draft nodes kept.
    """
    n = min(n, _rank(p, counts, order))
    _keep(p, counts, order, n)
    return n


@compiled(nogil=True)
def allocate_best(p, counts, table, drafting, forced, order):
    """Truncate the drafts to the number of nodes that maximises expected tokens per second; 0 is one of them.

    Args:
        p, counts, order: as for `allocate`.
        table: float64, seconds of a step by query tokens, see `StepTimes.table`.
        drafting: seconds that drafting takes.
        forced: number of nodes to keep (as far as there are), whatever they are worth; `FREE`: the best number.

    Returns:
        (draft nodes kept, expected gain over not drafting at all, as a share of it, nodes kept of the longest draft).
    """
    batch = len(counts)
    baseline = batch / at(table, batch)
    total = _rank(p, counts, order)
    best, best_rate, tokens = 0, baseline, float(batch)
    best_tokens = tokens
    for n in range(1, total + 1):
        if forced >= 0 and n > forced:
            break
        tokens += order[n - 1]
        rate = tokens / at(table, batch + n)
        if forced >= 0 or rate > best_rate:
            best, best_rate, best_tokens = n, rate, tokens
    if forced == 0:
        best, best_tokens = 0, float(batch)
    seconds = at(table, batch + best)
    return best, best_tokens / (seconds + drafting) / baseline - 1.0, _keep(p, counts, order, best)


@compiled(nogil=True)
def allocate_width(p, counts, table, drafting, widths, forced):
    """Truncate all drafts to the one width, out of `widths`, that maximises expected tokens per second; every request
    then costs that many query tokens.

    Args: as for `allocate_best`; widths: int32, ascending; forced: an index of widths, or `FREE`.

    Returns:
        (width, expected gain over not drafting at all, as a share of it, nodes kept of the largest draft).
    """
    batch = len(counts)
    baseline = batch / at(table, batch)
    largest = 1
    for b in range(batch):
        largest = max(largest, counts[b])
    tokens, done, best, best_rate, best_tokens = float(batch), 1, 1, baseline, float(batch)
    for k in range(len(widths)):
        width = widths[k]
        if width <= 1:
            continue
        for b in range(batch):
            for i in range(done, min(width, counts[b])):
                tokens += p[b, i]
        done = width
        rate = tokens / at(table, batch * width)
        if forced == k or (forced < 0 and rate > best_rate):
            best, best_rate, best_tokens = width, rate, tokens
        if width >= largest:
            break
    seconds = at(table, batch * best)
    for b in range(batch):
        counts[b] = min(counts[b], best)
    return best, best_tokens / (seconds + drafting) / baseline - 1.0, min(largest, best)
