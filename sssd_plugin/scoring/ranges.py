"""Ranges of the datastore's suffixes that start with a node's last tokens, and samples of the following tokens."""

from __future__ import annotations

import numpy as np

from freedraft.compiled import lean
from sssd_plugin.datastore.index.search import bucket, find_ngram, narrow, narrow_long, suffixes_of
from sssd_plugin.datastore.index.sub_index import SOURCE
from sssd_plugin.scoring.inputs import STORE_ORDERS
from sssd_plugin.sources import DATASTORE

MANY = STORE_ORDERS
MANY_SIZES = (6, 8, 12, 16, 24, 32, 48, 64)


@lean
def _narrow_many(table, above, here, k, known, token):
    """Narrow the ranges of order k of node `above`, of `known` tokens, by `token`, into the ranges of many tokens of
    node `here`; return their number of tokens, 0 if they are empty."""
    many = 0
    for j in range(len(table)):
        lo, hi = np.int64(above[j, k, 0]), np.int64(above[j, k, 1])
        if lo < hi:
            lo, hi = narrow_long(table, j, lo, hi, known, token)
            if lo < hi:
                many = known + 1
                here[j, MANY, 0], here[j, MANY, 1] = lo, hi
    return many


@lean
def find_many(table, ranges, tokens):
    """Write a node's ranges of many tokens, for the longest suffix of `tokens` in the store, out of MANY_SIZES; return
    its length, 0 for none. ranges: int32 [J, STORE_ORDERS + 1, 2]."""
    many, low, high, step = 0, 0, len(MANY_SIZES), 1
    ranges[: len(table), MANY] = 0
    while high > 0 and MANY_SIZES[high - 1] > len(tokens):
        high -= 1
    while low < high:  # sizes below `low` are in the store, from `high` on not: each look-up takes all of its tokens
        i = min(low + step, high) - 1
        k, found = MANY_SIZES[i], False
        for j in range(len(table)):
            if ranges[j, MANY - 1, 0] < ranges[j, MANY - 1, 1]:
                lo, hi = find_ngram(table, j, tokens, len(tokens) - k, k)
                if lo < hi:
                    if not found:
                        ranges[: len(table), MANY] = 0
                    many, found = k, True
                    ranges[j, MANY, 0], ranges[j, MANY, 1] = lo, hi
        if found:
            low, step = i + 1, 4 * step
        else:
            high, step = i, max(1, (i - low + 1) // 2)
    return many


@lean
def advance(table, ranges, many, source, target, token):
    """Write the ranges of node `target`: the context of node `source` (-1: empty), followed by `token`. table: int64
    [J, TABLE_COLUMNS], `View.table`; ranges, many: as in `Scratch`."""
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
                lo, hi = np.int64(ranges[source, j, k - 1, 0]), np.int64(ranges[source, j, k - 1, 1])
                lo, hi = narrow(table, j, lo, hi, k, token)
            here[j, k, 0], here[j, k, 1] = lo, hi
        here[j, 0, 0], here[j, 0, 1] = bucket(table, j, token)


@lean
def sample(table, ranges, k, offset, max_samples, out):
    """Write the tokens at `offset` of evenly spaced members of the ranges of order k, all sub-indices concatenated;
    return their number. The loop only loads, so that cache misses overlap."""
    size = np.int64(0)
    for j in range(len(table)):
        size += ranges[j, k, 1] - ranges[j, k, 0]
    take = min(size, max_samples)
    if take == 0:
        return 0
    whole, rest = size // take, size % take
    error, at, done = np.int64(0), np.int64(0), 0  # at: floor(q * size / take), from the start of this sub-index's part
    for j in range(len(table)):
        start = ranges[j, k, 0]
        part = np.int64(ranges[j, k, 1] - start)
        if at < part:
            tokens, suffixes = suffixes_of(table, j)
            while at < part and done < take:
                place = suffixes[start + at] + offset
                # A skipped token must not be the end of a document.
                out[done] = tokens[place] if tokens[place - 1] >= 0 else np.int32(-1)
                done += 1
                at += whole
                error += rest
                if error >= take:
                    error -= take
                    at += 1
        at -= part
    return take


@lean
def newest_follower(table, ranges, many, max_samples):
    """Return the token after the newest occurrence of the node's longest context, four tokens or many, and whether it
    was learnt; -1 and 0 for none. Documents are in the order of learning; of more than `max_samples` occurrences,
    evenly spaced ones are visited."""
    k, length = (MANY, many) if many > 0 else (STORE_ORDERS - 1, STORE_ORDERS)
    for j in range(len(table) - 1, -1, -1):
        start = np.int64(ranges[j, k, 0])
        size = np.int64(ranges[j, k, 1]) - start
        if size > 0:
            tokens, suffixes = suffixes_of(table, j)
            take, newest = min(size, max_samples), 0
            for q in range(take):
                newest = max(newest, suffixes[start + q * size // take])
            return tokens[newest + length], 0 if table[j, SOURCE] == DATASTORE else 1
    return np.int32(-1), 0
