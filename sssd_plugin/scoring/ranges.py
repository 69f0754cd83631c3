"""Ranges of the datastore's suffixes that start with a node's last tokens, and samples of the following tokens."""

from __future__ import annotations

import numpy as np

from freedraft.compiled import compiled
from sssd_plugin.datastore.index.search import bucket, find_ngram, narrow, narrow_bucket, narrow_within, suffixes_of

STORE_ORDERS = 4  # contexts of 1 to 4 tokens, and one of many
MANY = STORE_ORDERS
MANY_SIZES = (6, 8, 12, 16, 24, 32, 48, 64)


@compiled(nogil=True)
def _narrow_many(table, above, here, k, known, token):
    """Narrow the ranges of order k of node `above`, of `known` tokens, by `token`, into the ranges of many tokens of
    node `here`; return their number of tokens, 0 if they are empty."""
    many = 0
    for j in range(len(table)):
        lo, hi = np.int64(above[j, k, 0]), np.int64(above[j, k, 1])
        if lo < hi:
            tokens, suffixes = suffixes_of(table, j)
            lo, hi = narrow(tokens, suffixes, lo, hi, known, token)
            if lo < hi:
                many = known + 1
                here[j, MANY, 0], here[j, MANY, 1] = lo, hi
    return many


@compiled(nogil=True)
def find_many(table, ranges, tokens):
    """Write a node's ranges of many tokens, for the longest suffix of `tokens` in the store, out of MANY_SIZES; return
    its length, 0 for none. ranges: int32 [J, STORE_ORDERS + 1, 2]."""
    many = 0
    ranges[: len(table), MANY] = 0
    for k in MANY_SIZES:
        if k > len(tokens):
            break
        for j in range(len(table)):
            if ranges[j, MANY - 1, 0] < ranges[j, MANY - 1, 1]:
                lo, hi = find_ngram(table, j, tokens, len(tokens) - k, k)
                if lo < hi:
                    if many < k:
                        many = k
                        ranges[: len(table), MANY] = 0
                    ranges[j, MANY, 0], ranges[j, MANY, 1] = lo, hi
        if many < k:
            break
    return many


@compiled(nogil=True)
def _narrow_by_samples(table, start, end, k, samples, token):
    """Narrow the range of k tokens of the only sub-index by `token`, between two of its samples, which have the order
    of the range. samples: their number, at least 1, then the token at each."""
    taken, size, below = np.int64(samples[0]), end - start, 0
    while below < taken and samples[1 + below] < token:
        below += 1
    upto = below
    while upto < taken and samples[1 + upto] == token:
        upto += 1
    if taken == size:
        return start + below, start + upto
    if k == 1:
        return narrow_bucket(table, 0, start, end, token)
    a = start + ((below - 1) * size // taken + 1 if below > 0 else 0)
    b = start + (below * size // taken if below < taken else size)
    c = start + ((upto - 1) * size // taken + 1 if upto > 0 else 0)
    d = start + (upto * size // taken if upto < taken else size)
    tokens, suffixes = suffixes_of(table, 0)
    return narrow_within(tokens, suffixes, (a, b), (c, d), k, token)


@compiled(nogil=True)
def advance(table, ranges, many, samples, source, target, token):
    """Write the ranges of node `target`: the context of node `source` (-1: empty), followed by `token`. table: int64
    [J, 7], `View.table`; ranges, many, samples: as in `Scratch`."""
    here = ranges[target]
    here[: len(table), MANY] = 0
    many[target] = 0
    if source >= 0 and many[source] > 0:
        many[target] = _narrow_many(table, ranges[source], here, MANY, many[source], token)
    if source >= 0 and many[target] == 0:
        many[target] = _narrow_many(table, ranges[source], here, MANY - 1, STORE_ORDERS, token)
    for j in range(len(table)):
        for k in range(STORE_ORDERS - 1, 0, -1):
            lo, hi = np.int64(0), np.int64(0)
            if source >= 0:
                start, end = np.int64(ranges[source, j, k - 1, 0]), np.int64(ranges[source, j, k - 1, 1])
                if samples[source, k - 1, 0] > 0 and len(table) == 1:
                    lo, hi = _narrow_by_samples(table, start, end, k, samples[source, k - 1], token)
                elif end > start and k == 1:
                    lo, hi = narrow_bucket(table, j, start, end, token)
                elif end > start:
                    tokens, suffixes = suffixes_of(table, j)
                    lo, hi = narrow(tokens, suffixes, start, end, k, token)
            here[j, k, 0], here[j, k, 1] = lo, hi
        here[j, 0, 0], here[j, 0, 1] = bucket(table, j, token)


@compiled(nogil=True)
def _sample(table, ranges, k, offset, size, max_samples, out):
    """Write the tokens at `offset` of evenly spaced members of the ranges of order k, all sub-indices concatenated. The
    loop only loads, so that cache misses overlap."""
    take = min(size, max_samples)
    out[0] = take
    if take == 0:
        return
    whole, rest = size // take, size % take
    error, at, done = np.int64(0), np.int64(0), 0  # at: floor(q * size / take), from the start of this sub-index's part
    for j in range(len(table)):
        start = ranges[j, k, 0]
        part = np.int64(ranges[j, k, 1] - start)
        if at < part:
            tokens, suffixes = suffixes_of(table, j)
            while at < part and done < take:
                done += 1
                place = suffixes[start + at] + offset
                # A skipped token must not be the end of a document.
                out[done] = tokens[place] if tokens[place - 1] >= 0 else np.int32(-1)
                at += whole
                error += rest
                if error >= take:
                    error -= take
                    at += 1
        at -= part


@compiled(nogil=True, inline="always")
def sample_orders(table, ranges, many, skip, max_samples, out):
    """Sample a node's ranges of up to `len(out)` tokens, at the token after the next `skip`.

    The order above STORE_ORDERS has `many` tokens. `out`, int32 [K, 1 + max_samples], gets for each order the number of
    samples, then their tokens. The number is -1 for a shorter context with the same suffixes.
    """
    longer = np.int64(-1)  # size of the range one order up
    for k in range(len(out) - 1, -1, -1):
        size = np.int64(0)
        for j in range(len(table)):
            size += ranges[j, k, 1] - ranges[j, k, 0]
        if size > 0 and size == longer:
            out[k, 0] = -1
        else:
            _sample(table, ranges, k, (many if k == MANY else k + 1) + skip, size, max_samples, out[k])
        longer = size


@compiled(nogil=True)
def newest_follower(store, ranges, many, max_samples):
    """Return the token after the newest occurrence of the node's longest context, four tokens or many, and whether it
    was learnt; -1 and 0 for none. Documents are in the order of learning; of more than `max_samples` occurrences,
    evenly spaced ones are visited."""
    k, length = (MANY, many) if many > 0 else (STORE_ORDERS - 1, STORE_ORDERS)
    for j in range(len(store.table) - 1, -1, -1):
        start = np.int64(ranges[j, k, 0])
        size = np.int64(ranges[j, k, 1]) - start
        if size > 0:
            tokens, suffixes = suffixes_of(store.table, j)
            take, newest = min(size, max_samples), 0
            for q in range(take):
                newest = max(newest, suffixes[start + q * size // take])
            return tokens[newest + length], 1 if j >= store.static_rows else 0
    return np.int32(-1), 0
