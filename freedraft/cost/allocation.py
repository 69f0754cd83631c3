"""Chooses the nodes of a batch of drafts to verify: the likeliest ones, as many as pay (compiled)."""

import numpy as np

from freedraft.compiled import compiled

FREE = -1  # no forced number of tokens
WORTH = 1.03  # rate at which drafts longer than a head's own are preferred


@compiled(nogil=True)
def limit(nodes, counts, capacities, trees):
    """See `DraftBatch.limit`; nodes: its other arrays."""
    tokens, parents, depths, scores, kinds = nodes
    for b in range(len(counts)):
        kept, last = min(counts[b], 1), 0
        for i in range(kept, 0 if trees[b] else counts[b]):
            if parents[b, i] == last:
                tokens[b, kept], scores[b, kept], kinds[b, kept] = tokens[b, i], scores[b, i], kinds[b, i]
                parents[b, kept], depths[b, kept] = kept - 1, kept
                kept, last = kept + 1, i
        counts[b] = min(counts[b] if trees[b] else kept, capacities[b] + 1)


@compiled(nogil=True)
def _falling(p, counts):
    """The probabilities of all draft nodes, descending."""
    order, n = np.empty(p.size, p.dtype), 0
    for b in range(len(counts)):
        for i in range(1, counts[b]):
            order[n] = p[b, i]
            n += 1
    return np.sort(order[:n])[::-1]


@compiled(nogil=True)
def _keep(p, counts, order, n):
    """Truncate the drafts to the first n nodes of `order`; return the nodes kept of the longest draft."""
    threshold = order[n - 1] if n > 0 else 2.0
    ties = 0  # kept nodes with the probability of the last one kept
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
def keep_likeliest(p, counts, n):
    """Truncate the drafts to the n likeliest draft nodes of the batch, which has at least as many; see `allocate`."""
    _keep(p, counts, _falling(p, counts), n)


@compiled(nogil=True)
def allocate(p, counts, seconds, drafting, forced):
    """Truncate the drafts to the number of nodes (possibly 0) with the most expected tokens per second. Returns (draft
    nodes kept, expected gain over not drafting at all, as a share of it, nodes kept of the longest draft).

    Args:
        p: [B, N], probability of every node, falling from node to node.
        counts: int32 [B], in: nodes drafted, out: nodes kept.
        seconds: float64, step time by number of verified draft nodes.
        drafting: seconds that drafting takes.
        forced: number of nodes to keep regardless of gain; `FREE`: the best number.
    """
    batch, order = len(counts), _falling(p, counts)
    baseline = batch / seconds[0]
    tokens = best_tokens = float(batch)
    best, best_rate = 0, baseline
    for n in range(1, (len(order) if forced < 0 else min(forced, len(order))) + 1):
        tokens += order[n - 1]
        rate = tokens / seconds[n]
        if forced >= 0 or rate > best_rate:
            best, best_rate, best_tokens = n, rate, tokens
    return best, best_tokens / (seconds[best] + drafting) / baseline - 1.0, _keep(p, counts, order, best)


@compiled(nogil=True)
def allocate_width(p, counts, seconds, drafting, forced, widths, undrafted):
    """Truncate all drafts to the one of `widths` (int32, ascending) with the most expected tokens per second; every
    request then costs that number of query tokens. The rest is as for `allocate`, but that the width is returned.

    Args:
        seconds: float64 [1 + W], step times without drafts and with each width.
        forced: an index of widths, or `FREE`.
        undrafted: expected tokens of a request without drafts; above 1, drafts must win by `WORTH`.
    """
    batch, largest = len(counts), counts.max()
    tokens = best_tokens = batch * undrafted
    baseline = tokens / seconds[0]
    done, best, best_rate, best_seconds = 1, 1, baseline, seconds[0]
    if undrafted > 1.0:
        best_rate *= WORTH
    for k in range(len(widths)):
        width = widths[k]
        if width <= 1:
            continue
        for b in range(batch):
            for i in range(done, min(width, counts[b])):
                tokens += p[b, i]
        done = width
        rate = tokens / seconds[1 + k]
        if forced == k or (forced < 0 and rate > best_rate):
            best, best_rate, best_tokens, best_seconds = width, rate, tokens, seconds[1 + k]
        if width >= largest:
            break
    for b in range(batch):
        counts[b] = min(counts[b], best)
    return best, best_tokens / (best_seconds + drafting) / baseline - 1.0, min(largest, best)
