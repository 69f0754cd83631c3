"""Compiled look-ups in the sub-indices of a `Snapshot.table`, whose columns `sub_index.TABLE_COLUMNS` names."""

from __future__ import annotations

import numpy as np
from numba import njit

from sssd_plugin.datastore.sub_index import FENCE
from sssd_plugin.pointers import int32_at


@njit(nogil=True, cache=True)
def narrow(tokens, suffixes, lo, hi, offset, token):
    """The part of suffixes[lo:hi], which share their first `offset` tokens, that goes on with `token`: (lo, hi)."""
    return narrow_within(tokens, suffixes, lo, hi, lo, hi, offset, token)


@njit(nogil=True, cache=True)
def narrow_within(tokens, suffixes, a, b, c, d, offset, token):
    """As `narrow`, with the start of the part known to lie in [a, b] and its end in [c, d]."""
    while a < b:
        m = (a + b) >> 1
        if tokens[suffixes[m] + offset] < token:
            a = m + 1
        else:
            b = m
    # The part is most often tiny, so gallop from its start instead of bisecting all of what is left.
    first, step = a, 1
    a = max(a, c)
    while a + step <= d and tokens[suffixes[a + step - 1] + offset] <= token:
        a += step
        step += step
    b = min(a + step - 1, d)
    while a < b:
        m = (a + b) >> 1
        if tokens[suffixes[m] + offset] <= token:
            a = m + 1
        else:
            b = m
    return first, a


@njit(nogil=True, cache=True)
def bucket(table, j, token):
    """Suffixes of sub-index j that begin with `token`: (lo, hi)."""
    if 0 <= token < table[j, 5]:
        starts = int32_at(table[j, 2], table[j, 5] + 1)
        return starts[token], starts[token + 1]
    if token < 0:
        return 0, 0
    tokens, suffixes = int32_at(table[j, 0], table[j, 3] + 32), int32_at(table[j, 1], table[j, 4])
    return narrow(tokens, suffixes, 0, table[j, 4], 0, token)


@njit(nogil=True, cache=True)
def _first_fence(fences, a, b, token):
    """First place in [a, b) of a fence not below `token`, or b."""
    while a < b:
        m = (a + b) >> 1
        if fences[m] < token:
            a = m + 1
        else:
            b = m
    return a


@njit(nogil=True, cache=True)
def narrow_bucket(table, j, lo, hi, token):
    """As `narrow` with offset 1, for part of a bucket of sub-index j: the fences say where to look."""
    tokens = int32_at(table[j, 0], table[j, 3] + 32)
    suffixes = int32_at(table[j, 1], table[j, 4])
    fences = int32_at(table[j, 6], (table[j, 4] + FENCE - 1) // FENCE)
    start, end = np.int64((lo + FENCE - 1) // FENCE), np.int64((hi - 1) // FENCE + 1)  # the fences within [lo, hi)
    below = _first_fence(fences, start, end, token)
    upto = _first_fence(fences, below, end, np.int64(token) + 1)
    return narrow_within(
        tokens,
        suffixes,
        (below - 1) * FENCE + 1 if below > start else lo,
        below * FENCE if below < end else hi,
        (upto - 1) * FENCE + 1 if upto > start else lo,
        upto * FENCE if upto < end else hi,
        1,
        token,
    )
