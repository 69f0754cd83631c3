"""Compiled look-ups in the sub-indices of a `Snapshot.table`: addresses of tokens, suffix array, buckets; n, m, D."""

from __future__ import annotations

from numba import njit

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
