"""Places in earlier text from which a draft is copied on, token by token, without the network.

A copy is followed where it may lose so little of a path's score that choosing costs more than it brings. Its scores are
shares of earlier copies that went on, by source, agreement and length: `Weights.copies`, [ROWS, MAX_MATCH + 1].
"""

from __future__ import annotations

import numpy as np

from freedraft.compiled import lean
from freedraft.cost.acceptance import KINDS
from sssd_plugin.datastore.index.search import suffixes_of
from sssd_plugin.datastore.index.sub_index import SOURCE
from sssd_plugin.request_index import find
from sssd_plugin.scoring.inputs import LONG_ORDERS, REQUEST_ORDERS, SHORT_ORDERS, STORE_ORDERS
from sssd_plugin.scoring.matches import LENGTH, MAX_MATCH, POSITION
from sssd_plugin.scoring.ranges import MANY
from sssd_plugin.scoring.views import record
from sssd_plugin.sources import PREDICTION, REQUEST

NOWHERE, OWN = -2, -1  # texts: none, and the request's own; others are sub-indices of the store
ROWS = 4  # request and store, each with matches that disagree and that agree on the next token
SHORT_OCCURRENCES = 16  # newest occurrences of a single token to visit

PLACE = record(
    at="i8",  # position of the node's own token in the text
    back="i8",  # tokens from the place to the end of a request that goes on with a copy of its end; 0: it ends there
    text="i4",
    length="i4",  # of the match, at most MAX_MATCH
    row="i4",  # of the table of scores
)


@lean
def _set(place, text, at, length, row, back):
    place.text, place.at, place.length, place.row, place.back = text, at, min(length, MAX_MATCH), row, back


@lean
def find_in_request(request, matches, context, filled, depth, place):
    """Write the place of a node's longest match, the newest of these; without `matches`, of the last one to three
    tokens, none if `filled` is 0. depth: of the node. The text is NOWHERE if there is none."""
    tokens = request.tokens
    end, length, at, agree = len(tokens) - 1, 0, np.int64(-1), 1
    for m in range(1, 1 + matches[0, 0]):
        agree &= tokens[matches[m, POSITION] + 1] == tokens[matches[1, POSITION] + 1]
        if matches[m, LENGTH] > length:
            length, at = matches[m, LENGTH], np.int64(matches[m, POSITION])
    if length == 0 and filled > 0:
        i, seen, agree = request.heads[find(request, context[0])], 0, 0
        while i >= 0 and seen < SHORT_OCCURRENCES and length < SHORT_ORDERS:
            seen += 1
            match = 1 if i < end else 0
            while 0 < match < min(SHORT_ORDERS, filled) and i >= match and tokens[i - match] == context[match]:
                match += 1
            if match > length:
                length, at = match, np.int64(i)
            i = request.previous[i]
    _set(place, OWN if length > 0 else NOWHERE, at, length, agree, end - at if depth == 0 else 0)


@lean
def find_in_store(table, ranges, many, any_length, place):
    """Write the place of the longest context of a node in the store: in the middle of its range, where the likeliest
    next token probably is; any_length: also of four tokens or fewer. ranges: int32 [J, STORE_ORDERS + 1, 2]. The text
    is NOWHERE if there is none."""
    for k in range(MANY if many > 0 else STORE_ORDERS - 1, -1 if any_length else STORE_ORDERS - 1, -1):
        length = many if k == MANY else k + 1
        for j in range(len(table) - 1, -1, -1):
            lo, hi = np.int64(ranges[j, k, 0]), np.int64(ranges[j, k, 1])
            if lo < hi:
                text, suffixes = suffixes_of(table, j)
                agree = text[suffixes[lo] + length] == text[suffixes[hi - 1] + length]  # they are sorted
                _set(place, j, np.int64(suffixes[(lo + hi) // 2]) + length - 1, length, 2 + agree, 0)
                return
    _set(place, NOWHERE, 0, 0, 0, 0)


@lean
def share_of(place, copies):
    """Return the share of copies like this one that go on; 0 nowhere."""
    return np.float64(copies[place.row, place.length]) if place.text != NOWHERE else 0.0


@lean
def next_token(request, table, place):
    """Return the token after a place, negative if its text ends there."""
    if place.text == OWN:
        at = place.at + 1
        if at >= len(request.tokens):
            return request.tokens[at - place.back] if place.back > 0 else np.int32(-1)
        return request.tokens[at]
    text, _ = suffixes_of(table, place.text)
    return text[place.at + 1]


@lean
def go_on(request, above, place):
    """Write the place of the child of the node at `above`."""
    at = above.at + 1
    if above.text == OWN and at >= len(request.tokens):
        at -= above.back
    _set(place, above.text, at, above.length + 1, above.row, above.back)


@lean
def kind_of(sources, place):
    """Return a copied node's kind, see `inputs.NODE_KINDS`, and its source."""
    if place.text != OWN:
        source = sources.store.table[place.text, SOURCE]
        return min(place.length, STORE_ORDERS) * (REQUEST_ORDERS + 1) + KINDS * source
    orders = min(place.length, SHORT_ORDERS)
    for order in LONG_ORDERS:
        orders += place.length >= order
    return orders + KINDS * source_at(sources.predicted, place.at)


@lean
def source_at(predicted, at):
    """Return the source of the token after a place in a request's text. predicted: see `Sources`."""
    return PREDICTION if predicted[0] <= at + 1 < predicted[1] else REQUEST
