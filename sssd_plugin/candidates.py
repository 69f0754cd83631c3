"""Counts of what followed this context before: one row per candidate token, gathered from every source at one node."""

from __future__ import annotations

import numpy as np
from numba import njit

from sssd_plugin.datastore.index.search import bucket, narrow, narrow_bucket, narrow_within
from sssd_plugin.pointers import int32_at
from sssd_plugin.request_index import find

ORDERS = 6  # longest context looked up in the request, in tokens
STORE_ORDERS = 4  # and in the store
MAX_CANDIDATES = 256
MAX_SAMPLES = 32  # suffixes looked at per range
OCCURRENCES = 64  # newest occurrences of a token in the request that are looked at
HASH_BITS = 9

# Columns of the counts: store orders 1-4, request orders 1-6, then contexts that skip their last token.
STORE, INPUT, SKIP_STORE, SKIP_INPUT = 0, 4, 10, 13
COLUMNS = 15
ROW = 32  # bytes of a row of counts; every count is at most 64


@njit(nogil=True, cache=True)
def advance(table, lo, hi, sampled, source, target, token):
    """Suffix-array ranges of the context of `source` followed by `token`.

    Args:
        table: int64 [J, 7], `Snapshot.table`.
        lo, hi: int32 [nodes, J, STORE_ORDERS]; entry [i, j, k - 1] is the range of the last k tokens of i's context.
        sampled: int32 [nodes, STORE_ORDERS, 1 + MAX_SAMPLES], from `gather`: number of samples, then the token at
            each; 0 where `gather` has not seen the node.
        source, target: nodes; source may be -1 for an empty context.
    """
    for j in range(len(table)):
        tokens = int32_at(table[j, 0], table[j, 3] + 32)
        suffixes = int32_at(table[j, 1], table[j, 4])
        for k in range(STORE_ORDERS - 1, 0, -1):
            a, b = np.int64(0), np.int64(0)
            if source >= 0:
                start, end = np.int64(lo[source, j, k - 1]), np.int64(hi[source, j, k - 1])
                take = np.int64(sampled[source, k - 1, 0])
                if take > 0 and len(table) == 1:
                    # The samples are sorted as their range is, so they tell between which of them the token lies.
                    size = end - start
                    below = 0
                    while below < take and sampled[source, k - 1, 1 + below] < token:
                        below += 1
                    upto = below
                    while upto < take and sampled[source, k - 1, 1 + upto] == token:
                        upto += 1
                    if take == size:
                        a, b = start + below, start + upto
                    elif k == 1:
                        a, b = narrow_bucket(table, j, start, end, token)
                    else:
                        a, b = narrow_within(
                            tokens,
                            suffixes,
                            start + ((below - 1) * size // take + 1 if below > 0 else 0),
                            start + (below * size // take if below < take else size),
                            start + ((upto - 1) * size // take + 1 if upto > 0 else 0),
                            start + (upto * size // take if upto < take else size),
                            k,
                            token,
                        )
                elif end > start and k == 1:
                    a, b = narrow_bucket(table, j, start, end, token)
                elif end > start:
                    a, b = narrow(tokens, suffixes, start, end, k, token)
            lo[target, j, k] = a
            hi[target, j, k] = b
        a, b = bucket(table, j, token)
        lo[target, j, 0] = a
        hi[target, j, 0] = b


@njit(nogil=True, cache=True)
def _candidate(token, stamp, keys, stamps, entries, names, counts, n):
    """Row of `token`, a new one if need be: (row or -1 when there is no room, number of rows)."""
    h = np.int64(((np.uint64(token) * np.uint64(2654435761)) & np.uint64(0xFFFFFFFF)) >> np.uint64(32 - HASH_BITS))
    while stamps[h] == stamp:
        if keys[h] == token:
            return np.int64(entries[h]), n
        h = np.int64((h + 1) & ((1 << HASH_BITS) - 1))
    if n >= MAX_CANDIDATES:
        return np.int64(-1), n
    stamps[h] = stamp
    keys[h] = token
    entries[h] = n
    names[n] = token
    counts[n, :] = 0
    return np.int64(n), n + 1


@njit(nogil=True, cache=True)
def _lookup(token, stamp, keys, stamps, entries):
    """Row of `token`, -1 if it is not a candidate."""
    h = np.int64(((np.uint64(token) * np.uint64(2654435761)) & np.uint64(0xFFFFFFFF)) >> np.uint64(32 - HASH_BITS))
    while stamps[h] == stamp:
        if keys[h] == token:
            return np.int64(entries[h])
        h = np.int64((h + 1) & ((1 << HASH_BITS) - 1))
    return np.int64(-1)


@njit(nogil=True, cache=True)
def _size(lo, hi, node, k):
    size = np.int64(0)
    for j in range(lo.shape[1]):
        size += hi[node, j, k] - lo[node, j, k]
    return size


@njit(nogil=True, cache=True)
def _sample(table, lo, hi, node, k, offset, samples, out):
    """Tokens at `offset` of evenly spaced members of the node's range k, all sub-indices end to end.

    Nothing but loads, so that they overlap: what they hit is cold. out: int32, number of samples, then their tokens.
    """
    size = _size(lo, hi, node, k)
    take = min(size, samples)
    out[0] = take
    if take == 0:
        return
    whole, rest = size // take, size % take
    error, at, done = np.int64(0), np.int64(0), 0  # at: floor(q * size / take), from the start of this sub-index's part
    for j in range(len(table)):
        part = np.int64(hi[node, j, k] - lo[node, j, k])
        if at < part:
            tokens = int32_at(table[j, 0], table[j, 3] + 32)
            suffixes = int32_at(table[j, 1], table[j, 4])
            start = lo[node, j, k]
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


@njit(nogil=True, cache=True)
def _count(sampled, column, may_add, stamp, keys, stamps, entries, names, counts, n, totals, kinds):
    """Count sampled tokens in `column`; number of candidates."""
    totals[column] = sampled[0]
    last, row = np.int32(-1), np.int64(-1)
    for q in range(1, 1 + sampled[0]):
        token = sampled[q]
        if token < 0:
            continue
        if token != last:
            last = token
            if may_add:
                row, n = _candidate(token, stamp, keys, stamps, entries, names, counts, n)
            else:
                row = _lookup(token, stamp, keys, stamps, entries)
        if row >= 0:
            if counts[row, column] == 0:
                kinds[column] += 1
            counts[row, column] += 1
    return n


@njit(nogil=True, cache=True)
def gather(
    table, lo, hi, sampled, node, parent, samples,
    tokens, previous, heads, table_size, length, context, context_length,
    stamp, keys, stamps, entries, names, counts, totals, kinds, skipped,
):  # fmt: skip
    """Candidates at one node and how often each followed, by source and context length.

    Args:
        table, lo, hi, sampled: as in `advance`; the node's samples are written.
        node, parent: rows of lo and hi for this context, and for it without its last token (-1: there is none).
        samples: suffixes sampled per range.
        tokens, previous, heads, table_size, length: the request, as in `RequestIndex`.
        context: int32 [>= context_length], newest token first; drafted tokens included.
        stamp: differs from that of every earlier call with this scratch space (keys, stamps, entries).
        names: int32 [MAX_CANDIDATES], out: the candidates.
        counts: uint8 [MAX_CANDIDATES, ROW], out: counts by column.
        skipped: int32 [3, 1 + MAX_SAMPLES], scratch.
        totals, kinds: int32 [COLUMNS], out: observations, and distinct tokens among them, by column.

    Returns:
        Number of candidates.
    """
    n = 0
    totals[:] = 0
    kinds[:] = 0
    longer = np.int64(-1)  # size of the range one order up
    for k in range(STORE_ORDERS - 1, -1, -1):
        size = _size(lo, hi, node, k)
        if size > 0 and size == longer:
            sampled[node, k, 0] = -1  # the same suffixes: the shorter context adds nothing
        else:
            _sample(table, lo, hi, node, k, k + 1, samples, sampled[node, k])
        longer = size
    if parent >= 0:
        longer = np.int64(-1)
        for k in range(2, -1, -1):
            size = _size(lo, hi, parent, k)
            if size > 0 and size == longer:
                skipped[k, 0] = -1
            else:
                _sample(table, lo, hi, parent, k, k + 2, samples, skipped[k])
            longer = size

    for k in range(STORE_ORDERS - 1, -1, -1):
        if sampled[node, k, 0] < 0:
            totals[STORE + k] = totals[STORE + k + 1]
            kinds[STORE + k] = kinds[STORE + k + 1]
            for c in range(n):
                counts[c, STORE + k] = counts[c, STORE + k + 1]
            for q in range(1 + sampled[node, k + 1, 0]):
                sampled[node, k, q] = sampled[node, k + 1, q]
        else:
            n = _count(
                sampled[node, k], STORE + k, True, stamp, keys, stamps, entries, names, counts, n, totals, kinds
            )  # fmt: skip

    i = heads[find(heads, table_size, tokens, context[0])]
    seen = 0
    while i >= 0 and seen < OCCURRENCES:
        if i < length - 1:
            seen += 1
            match = 1
            while match < ORDERS and match < context_length and i >= match and tokens[i - match] == context[match]:
                match += 1
            row, n = _candidate(tokens[i + 1], stamp, keys, stamps, entries, names, counts, n)
            if row >= 0:
                for k in range(match):
                    if counts[row, INPUT + k] == 0:
                        kinds[INPUT + k] += 1
                    counts[row, INPUT + k] += 1
                    totals[INPUT + k] += 1
        i = previous[i]

    if parent >= 0:
        for k in range(2, -1, -1):
            if skipped[k, 0] < 0:
                totals[SKIP_STORE + k] = totals[SKIP_STORE + k + 1]
                for c in range(n):
                    counts[c, SKIP_STORE + k] = counts[c, SKIP_STORE + k + 1]
            else:
                n = _count(
                    skipped[k], SKIP_STORE + k, k > 0, stamp, keys, stamps, entries, names, counts, n, totals, kinds
                )  # fmt: skip

    if context_length >= 3:
        i = heads[find(heads, table_size, tokens, context[1])]
        seen = 0
        while i >= 0 and seen < OCCURRENCES:
            if i < length - 2:
                seen += 1
                totals[SKIP_INPUT] += 1
                if i >= 1 and tokens[i - 1] == context[2]:
                    totals[SKIP_INPUT + 1] += 1
                    row, n = _candidate(tokens[i + 2], stamp, keys, stamps, entries, names, counts, n)
                    if row >= 0:
                        counts[row, SKIP_INPUT + 1] += 1
                else:
                    row = _lookup(tokens[i + 2], stamp, keys, stamps, entries)
                if row >= 0:
                    counts[row, SKIP_INPUT] += 1
            i = previous[i]
    return n
