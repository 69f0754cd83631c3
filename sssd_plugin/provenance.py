"""Which source knew the tokens that were accepted: looked up again, so that drafting itself need not keep account.

A token belongs to the source in which the longest context before it (at most `CONTEXT` tokens) was followed by it; on a
tie the request's own tokens come first, then the prepared store, then what was learnt.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from sssd_plugin.datastore.index.search import bucket, narrow
from sssd_plugin.pointers import int32_at
from sssd_plugin.request_index import LENGTH, PREVIOUS, TOKENS

SOURCES = ("input", "static", "live")
CONTEXT = 4
HIT = 2
"""A source that knows what followed the last so many tokens has something to offer."""
OCCURRENCES = 64

# Entries of the tally: look-ups; hits by source; accepted tokens by source, then those that no source knew.
LOOKUPS, HITS, ACCEPTED, SIZE = 0, 1, 4, 8


@njit(nogil=True, cache=True)
def _in_request(tokens, previous, p, following):
    """Longest context before place p that occurred earlier, followed by the token at p if `following`."""
    best, seen = 0, 0
    i = np.int64(previous[p - 1])
    while i >= 0 and seen < OCCURRENCES and best < CONTEXT:
        if not following or tokens[i + 1] == tokens[p]:
            match = 1
            while match < CONTEXT and i >= match and tokens[i - match] == tokens[p - 1 - match]:
                match += 1
            best = max(best, match)
        seen += 1
        i = np.int64(previous[i])
    return best


@njit(nogil=True, cache=True)
def _in_store(table, first, last, tokens, p, longest, least, following):
    """As `_in_request`, in the sub-indices from `first` to `last`; contexts of `least` to `longest` tokens, else 0."""
    for k in range(min(longest, p), least - 1, -1):
        length = k + 1 if following else k
        for j in range(first, last):
            data = int32_at(table[j, 0], table[j, 3] + 32)
            suffixes = int32_at(table[j, 1], table[j, 4])
            a, b = bucket(table, j, tokens[p - k])
            for offset in range(1, length):
                if a >= b:
                    break
                a, b = narrow(data, suffixes, a, b, offset, tokens[p - k + offset])
            if a < b:
                return k
    return 0


@njit(nogil=True, cache=True)
def account(slots, slot_ids, rows, bounds, groups, static_rows, gained, tally):
    """Add up where the last tokens of these requests come from, and who knows their present context.

    Args:
        slots: `RequestIndex.slots`; slot_ids: int64 [B], -1 is skipped.
        rows, bounds, static_rows: of a `View`; groups: int64 [B].
        gained: int64 [B], tokens that the last step added: all but the last one were drafted.
        tally: int64 [SIZE], added to.
    """
    for b in range(len(slot_ids)):
        if slot_ids[b] < 0:
            continue
        n = slots[slot_ids[b], LENGTH]
        tokens = int32_at(slots[slot_ids[b], TOKENS], n)
        previous = int32_at(slots[slot_ids[b], PREVIOUS], n)
        table = rows[bounds[groups[b]] : bounds[groups[b] + 1]]
        n_static = static_rows[groups[b]]
        for p in range(max(1, n - gained[b]), n - 1):
            found, source = _in_request(tokens, previous, p, True), 0
            k = _in_store(table, 0, n_static, tokens, p, CONTEXT, found + 1, True)
            if k > found:
                found, source = k, 1
            k = _in_store(table, n_static, len(table), tokens, p, CONTEXT, found + 1, True)
            if k > found:
                found, source = k, 2
            tally[ACCEPTED + (source if found > 0 else 3)] += 1
        if n < HIT:
            continue
        tally[LOOKUPS] += 1
        if _in_request(tokens, previous, n, False) >= HIT:
            tally[HITS] += 1
        if _in_store(table, 0, n_static, tokens, n, HIT, HIT, False) > 0:
            tally[HITS + 1] += 1
        if _in_store(table, n_static, len(table), tokens, n, HIT, HIT, False) > 0:
            tally[HITS + 2] += 1
