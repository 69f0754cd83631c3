"""Source attribution: which source contained a token.

Tokens are looked up again, so drafting itself keeps no record. A token belongs to the source in which it followed the
longest context (at most `CONTEXT` tokens). Ties: the request's own tokens first, then the built store, then learnt
text.
"""

import numpy as np

from freedraft.compiled import compiled
from sssd_plugin.datastore.index.search import find_ngram
from sssd_plugin.request_index import find, request_at
from sssd_plugin.scoring.views import store_of, write_context

SOURCES = ("input", "static", "live", "other")
CONTEXT = 4
OCCURRENCES = 64


@compiled(nogil=True)
def _in_request(request, before, ngram):
    """Return how many of the tokens before the last one of `ngram` precede it somewhere in the request, too, where they
    end at a position below `before`."""
    tokens, n = request.tokens, len(ngram) - 1
    best, seen = 0, 0
    i = np.int64(request.heads[find(request, ngram[n - 1])])
    while i >= 0 and seen < OCCURRENCES and best < n:
        if i < before:
            seen += 1
            if tokens[i + 1] == ngram[n]:
                match = 1
                while match < n and i >= match and tokens[i - match] == ngram[n - 1 - match]:
                    match += 1
                best = max(best, match)
        i = np.int64(request.previous[i])
    return best


@compiled(nogil=True)
def _source(request, store, before, ngram):
    """Return the index in SOURCES of the last token of `ngram`; before: see `_in_request`."""
    longest, n = _in_request(request, before, ngram), len(ngram) - 1
    source = 0 if longest > 0 else 3
    for j in range(len(store.table)):
        for k in range(n, longest, -1):
            lo, hi = find_ngram(store.table, j, ngram, n - k, k + 1)
            if lo < hi:
                longest, source = k, 1 if j < store.static_rows else 2
                break
    return source


@compiled(nogil=True)
def attribute(slots, slot_ids, view, groups, gained, draft, tally):
    """Count the newest tokens and the draft tokens of these requests, by source.

    Args:
        slots: `RequestIndex.slots`; slot_ids: int64 [B], -1 is skipped.
        view, groups: see `views.store_of`; groups: int64 [B].
        gained: int64 [B], new tokens of the last step, all but the last one drafted.
        draft: tokens, parents and counts of a `DraftBatch`.
        tally: int64 [2, 4], accepted and draft tokens by SOURCES, added to.
    """
    draft_tokens, parents, counts = draft
    context, ngram = np.empty(CONTEXT + 1, np.int32), np.empty(CONTEXT + 1, np.int32)
    for b in range(len(slot_ids)):
        if slot_ids[b] < 0:
            continue
        request, store = request_at(slots, slot_ids[b]), store_of(view, groups[b])
        tokens, n = request.tokens, len(request.tokens)
        for p in range(max(1, n - gained[b]), n - 1):
            tally[0, _source(request, store, p - 1, tokens[max(0, p - CONTEXT) : p + 1])] += 1
        for i in range(1, counts[b]):
            filled = write_context(tokens, draft_tokens[b], parents[b], i, context)
            for k in range(filled):
                ngram[k] = context[filled - 1 - k]
            tally[1, _source(request, store, n - 1, ngram[:filled])] += 1
