"""Ranges of the datastore's suffixes that go on from a node's last tokens, and samples of what followed there."""

from __future__ import annotations

import numpy as np

from freedraft.compiled import compiled
from sssd_plugin.datastore.index.search import bucket, find_ngram, narrow, narrow_bucket, narrow_within, suffixes_of

STORE_ORDERS = 4  # contexts of 1 to 4 tokens, and one of many
MANY = STORE_ORDERS
MANY_SIZES = (6, 8, 12, 16, 24, 32, 48, 64)


@compiled(nogil=True)
def _narrow_many(table, ranges, source, target, k, known, token, many):
    """Narrow range k of `source`, of `known` tokens, to what goes on with `token`: the range of many of `target`."""
    for j in range(len(table)):
        lo, hi = np.int64(ranges[source, j, k, 0]), np.int64(ranges[source, j, k, 1])
        if lo < hi:
            tokens, suffixes = suffixes_of(table, j)
            lo, hi = narrow(tokens, suffixes, lo, hi, known, token)
            if lo < hi:
                many[target] = known + 1
                ranges[target, j, MANY, 0] = lo
                ranges[target, j, MANY, 1] = hi


@compiled(nogil=True)
def find_many(table, ranges, many, node, tokens):
    """Write the node's range of many tokens: of as many of the last in `tokens` as the store has, by MANY_SIZES."""
    many[node] = 0
    ranges[node, : len(table), MANY] = 0
    for k in MANY_SIZES:
        if k > len(tokens):
            break
        for j in range(len(table)):
            if ranges[node, j, MANY - 1, 0] < ranges[node, j, MANY - 1, 1]:
                lo, hi = find_ngram(table, j, tokens, len(tokens) - k, k)
                if lo < hi:
                    if many[node] < k:
                        many[node] = k
                        ranges[node, : len(table), MANY] = 0
                    ranges[node, j, MANY, 0] = lo
                    ranges[node, j, MANY, 1] = hi
        if many[node] < k:
            break


@compiled(nogil=True)
def advance(table, ranges, many, samples, source, target, token):
    """Write the ranges of node `target`: the context of node `source`, empty if that is -1, followed by `token`. table:
    int64 [J, 7], `Snapshot.table`; ranges, many, samples: as in `Scratch`."""
    many[target] = 0
    ranges[target, : len(table), MANY] = 0
    if source >= 0 and many[source] > 0:
        _narrow_many(table, ranges, source, target, MANY, many[source], token, many)
    if source >= 0 and many[target] == 0:
        _narrow_many(table, ranges, source, target, MANY - 1, STORE_ORDERS, token, many)
    for j in range(len(table)):
        tokens, suffixes = suffixes_of(table, j)
        for k in range(STORE_ORDERS - 1, 0, -1):
            lo, hi = np.int64(0), np.int64(0)
            if source >= 0:
                start, end = np.int64(ranges[source, j, k - 1, 0]), np.int64(ranges[source, j, k - 1, 1])
                taken = np.int64(samples[source, k - 1, 0])
                if taken > 0 and len(table) == 1:
                    # The samples are sorted as their range is, so they tell between which of them the token lies.
                    size = end - start
                    below = 0
                    while below < taken and samples[source, k - 1, 1 + below] < token:
                        below += 1
                    upto = below
                    while upto < taken and samples[source, k - 1, 1 + upto] == token:
                        upto += 1
                    if taken == size:
                        lo, hi = start + below, start + upto
                    elif k == 1:
                        lo, hi = narrow_bucket(table, j, start, end, token)
                    else:
                        a = start + ((below - 1) * size // taken + 1 if below > 0 else 0)
                        b = start + (below * size // taken if below < taken else size)
                        c = start + ((upto - 1) * size // taken + 1 if upto > 0 else 0)
                        d = start + (upto * size // taken if upto < taken else size)
                        lo, hi = narrow_within(tokens, suffixes, a, b, c, d, k, token)
                elif end > start and k == 1:
                    lo, hi = narrow_bucket(table, j, start, end, token)
                elif end > start:
                    lo, hi = narrow(tokens, suffixes, start, end, k, token)
            ranges[target, j, k, 0] = lo
            ranges[target, j, k, 1] = hi
        lo, hi = bucket(table, j, token)
        ranges[target, j, 0, 0] = lo
        ranges[target, j, 0, 1] = hi


@compiled(nogil=True)
def _sample(table, ranges, node, k, offset, size, max_samples, out):
    """Take the tokens at `offset` of evenly spaced members of the node's range k, all sub-indices end to end. There is
    nothing but loads, so that they overlap: what they hit is cold. `out` gets the number of samples, then their
    tokens."""
    take = min(size, max_samples)
    out[0] = take
    if take == 0:
        return
    whole, rest = size // take, size % take
    error, at, done = np.int64(0), np.int64(0), 0  # at: floor(q * size / take), from the start of this sub-index's part
    for j in range(len(table)):
        start = ranges[node, j, k, 0]
        part = np.int64(ranges[node, j, k, 1] - start)
        if at < part:
            tokens, suffixes = suffixes_of(table, j)
            while at < part and done < take:
                done += 1
                place = suffixes[start + at] + offset
                # Where a token was skipped, it must not have been the end of a document.
                out[done] = tokens[place] if tokens[place - 1] >= 0 else np.int32(-1)
                at += whole
                error += rest
                if error >= take:
                    error -= take
                    at += 1
        at -= part


@compiled(nogil=True, inline="always")
def sample_orders(table, ranges, node, orders, many, skip, max_samples, out):
    """Sample the node's ranges of `orders` tokens and of fewer, at the token after the next `skip`.

    The order above STORE_ORDERS is that of `many` tokens. A shorter context that has the same suffixes adds nothing:
    its number of samples is -1.
    """
    longer = np.int64(-1)  # size of the range one order up
    for k in range(orders - 1, -1, -1):
        size = np.int64(0)
        for j in range(len(table)):
            size += ranges[node, j, k, 1] - ranges[node, j, k, 0]
        if size > 0 and size == longer:
            out[k, 0] = -1
        else:
            _sample(table, ranges, node, k, (many if k == MANY else k + 1) + skip, size, max_samples, out[k])
        longer = size


@compiled(nogil=True)
def newest_follower(store, ranges, node, many, max_samples):
    """Return the token behind the newest place of the node's longest context, four tokens or many, and whether it was
    learnt; -1 and 0 for none. Documents stand in the order in which they were learnt; of a part of more than
    `max_samples` places, evenly spaced ones are looked at."""
    k, length = (MANY, many) if many > 0 else (STORE_ORDERS - 1, STORE_ORDERS)
    for j in range(len(store.table) - 1, -1, -1):
        start = np.int64(ranges[node, j, k, 0])
        size = np.int64(ranges[node, j, k, 1]) - start
        if size > 0:
            tokens, suffixes = suffixes_of(store.table, j)
            take, newest = min(size, max_samples), 0
            for q in range(take):
                newest = max(newest, suffixes[start + q * size // take])
            return tokens[newest + length], 1 if j >= store.static_rows else 0
    return np.int32(-1), 0
