"""Source attribution: which source contained the accepted tokens.

Tokens are looked up again, so drafting itself keeps no record. A token belongs to the source in which it followed the
longest context (at most `CONTEXT` tokens). Ties: the request's own tokens first, then the built store, then learnt
text.
"""

import numpy as np

from freedraft.compiled import compiled
from sssd_plugin.datastore.index.search import find_ngram
from sssd_plugin.request_index import request_at
from sssd_plugin.scoring.views import store_of

SOURCES = ("input", "static", "live")
CONTEXT = 4
HIT = 2  # context length in tokens that a source must contain to count as a hit
OCCURRENCES = 64

# Entries of the tally: look-ups; hits by source; accepted tokens by source, then those of no source.
LOOKUPS, HITS, ACCEPTED, SIZE = 0, 1, 4, 8


@compiled(nogil=True)
def _in_request(request, p, following):
    """Return the longest context before position p that occurred earlier, followed by the token at p if `following`."""
    tokens = request.tokens
    best, seen = 0, 0
    i = np.int64(request.previous[p - 1])
    while i >= 0 and seen < OCCURRENCES and best < CONTEXT:
        if not following or tokens[i + 1] == tokens[p]:
            match = 1
            while match < CONTEXT and i >= match and tokens[i - match] == tokens[p - 1 - match]:
                match += 1
            best = max(best, match)
        seen += 1
        i = np.int64(request.previous[i])
    return best


@compiled(nogil=True)
def _in_store(table, tokens, p, max_context, min_context, following):
    """Like `_in_request`, for a store: contexts of `min_context` to `max_context` tokens, else 0."""
    for k in range(min(max_context, p), min_context - 1, -1):
        for j in range(len(table)):
            lo, hi = find_ngram(table, j, tokens, p - k, k + 1 if following else k)
            if lo < hi:
                return k
    return 0


@compiled(nogil=True)
def attribute(slots, slot_ids, view, groups, gained, tally):
    """Count the sources of the newest tokens of these requests, and the hits of their present context.

    Args:
        slots: `RequestIndex.slots`; slot_ids: int64 [B], -1 is skipped.
        view, groups: see `views.store_of`; groups: int64 [B].
        gained: int64 [B], new tokens of the last step, all but the last one drafted.
        tally: int64 [SIZE], added to.
    """
    for b in range(len(slot_ids)):
        if slot_ids[b] < 0:
            continue
        request, store = request_at(slots, slot_ids[b]), store_of(view, groups[b])
        tokens, static, live = request.tokens, store.table[: store.static_rows], store.table[store.static_rows :]
        n = len(tokens)
        for p in range(max(1, n - gained[b]), n - 1):
            longest, source = _in_request(request, p, True), 0
            for number, table in ((1, static), (2, live)):
                k = _in_store(table, tokens, p, CONTEXT, longest + 1, True)
                if k > longest:
                    longest, source = k, number
            tally[ACCEPTED + (source if longest > 0 else 3)] += 1
        if n < HIT:
            continue
        tally[LOOKUPS] += 1
        tally[HITS] += _in_request(request, n, False) >= HIT
        tally[HITS + 1] += _in_store(static, tokens, n, HIT, HIT, False) > 0
        tally[HITS + 2] += _in_store(live, tokens, n, HIT, HIT, False) > 0
