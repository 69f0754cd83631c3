"""Compiled look-ups in the sub-indices of a `View.table` (its columns: `sub_index.TABLE_COLUMNS`)."""

import numpy as np

from freedraft.compiled import lean
from sssd_plugin.datastore.index.sub_index import PAD, SPARSE_STEP
from sssd_plugin.pointers import array_at


@lean
def suffixes_of(table, j):
    """Return the tokens (int32 [n + PAD]) and the suffix array (int32 [m]) of sub-index j."""
    return array_at(table[j, 0], (table[j, 3] + PAD,), np.int32), array_at(table[j, 1], (table[j, 4],), np.int32)


@lean
def _narrow(tokens, suffixes, start, end, offset, token):
    """Like `narrow`, if the start of the part lies within the bounds `start` and its end within the bounds `end`, both
    inclusive."""
    (a, b), (c, d) = start, end
    while a < b:
        m = (a + b) >> 1
        if tokens[suffixes[m] + offset] < token:
            a = m + 1
        else:
            b = m
    # The part is usually tiny, so gallop from its start instead of bisecting the rest.
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


@lean
def _first_not_below(sparse, a, b, token):
    """Return the first index in [a, b) of the sparse index with an entry not below `token`, or b."""
    while a < b:
        m = (a + b) >> 1
        if sparse[m] < token:
            a = m + 1
        else:
            b = m
    return a


@lean
def narrow(table, j, lo, hi, offset, token):
    """Return the part (lo, hi) of the suffixes lo..hi of sub-index j, which share `offset` tokens, that continues with
    `token`. Within a bucket, which may be large, the sparse index is read first."""
    tokens, suffixes = suffixes_of(table, j)
    if offset != 1:
        return _narrow(tokens, suffixes, (lo, hi), (lo, hi), offset, token)
    sparse = array_at(table[j, 6], ((table[j, 4] + SPARSE_STEP - 1) // SPARSE_STEP,), np.int32)
    # The entries of suffixes within [lo, hi).
    start, end = np.int64((lo + SPARSE_STEP - 1) // SPARSE_STEP), np.int64((hi - 1) // SPARSE_STEP + 1)
    below = _first_not_below(sparse, start, end, token)
    upto = _first_not_below(sparse, below, end, np.int64(token) + 1)
    a = (below - 1) * SPARSE_STEP + 1 if below > start else lo
    b = below * SPARSE_STEP if below < end else hi
    c = (upto - 1) * SPARSE_STEP + 1 if upto > start else lo
    d = upto * SPARSE_STEP if upto < end else hi
    return _narrow(tokens, suffixes, (a, b), (c, d), 1, token)


@lean
def narrow_long(table, j, lo, hi, offset, token):
    """Like `narrow`, for lo < hi: where the first suffix and the last one continue alike, all do."""
    tokens, suffixes = suffixes_of(table, j)
    if tokens[suffixes[lo] + offset] == token == tokens[suffixes[hi - 1] + offset]:
        return lo, hi
    return narrow(table, j, lo, hi, offset, token)


@lean
def bucket(table, j, token):
    """Return the suffixes of sub-index j that start with `token`: (lo, hi)."""
    if 0 <= token < table[j, 5]:
        starts = array_at(table[j, 2], (table[j, 5] + 1,), np.int32)
        return starts[token], starts[token + 1]
    if token < 0:
        return 0, 0
    return narrow(table, j, 0, table[j, 4], 0, token)


@lean
def find_ngram(table, j, tokens, start, length):
    """Return the range (lo, hi) of the suffixes of sub-index j that start with tokens[start:start + length]."""
    lo, hi = bucket(table, j, tokens[start])
    for offset in range(1, length):
        if lo >= hi:
            break
        lo, hi = narrow_long(table, j, np.int64(lo), np.int64(hi), offset, tokens[start + offset])
    return lo, hi
