"""Counts of tokens that followed a node's context in every source, one row per candidate token."""

from __future__ import annotations

from collections import namedtuple

import numpy as np

from freedraft.compiled import lean
from sssd_plugin import recycled_logits
from sssd_plugin.pointers import array_at
from sssd_plugin.request_index import GRAM, find
from sssd_plugin.scoring import matches
from sssd_plugin.scoring.inputs import (
    COLUMN,
    COLUMNS,
    INPUTS,
    LONG_ORDERS,
    NODE_INPUTS,
    SHORT_ORDERS,
    SKIP_ORDERS,
    STORE_ORDERS,
)
from sssd_plugin.scoring.matches import EDIT, LENGTH, POSITION, SINCE
from sssd_plugin.scoring.places import PLACE
from sssd_plugin.scoring.ranges import MANY, newest_follower, sample
from sssd_plugin.scoring.views import record
from sssd_plugin.scoring.weights import WIDTH

CONTEXT = 6  # last tokens kept per node
MAX_CANDIDATES = 256
MAX_SAMPLES = 64  # suffixes sampled per range
OCCURRENCES = 64  # newest occurrences of a single token to visit in the request
SHORTLIST = 16
_HASH_BITS = 9

STAMP, NUMBER = range(2)  # of `Found.state`: calls of `gather` so far; candidates of this node

# Of candidates: their share of the store's tokens; probability interpolated over contexts in the store, and over those
# in the request; the shortlist's criterion.
SHARE, BY_STORE, BY_REQUEST, PROMISE = range(4)
_CANDIDATE = record(
    token="i4",
    match="i4",  # length of its longest match, 0 for none
    since="i4",  # of its alignment: tokens equal since the edit, -1 for none
    edit="i4",  # and the kind of edit
    cost="i4",  # by recycled logits (`recycled_logits.ENTRY`), -1 if not among the likeliest
)
_COLUMN = record(
    total="i4",  # observations
    distinct="i4",  # tokens among them
)
_ABOUT = record(
    longest="i4",  # row of the candidate of the longest match, -1 for none
    newest="i4",  # and of the newest one
    run="i4",  # result of `align_root`
    evidence="i4",
    follower="i4",  # result of `newest_follower`
    learnt="i4",
)
_LEAF = record(score="f8", parent="i4", token="i4", kind="i4")
_HASH = record(stamp="i8", token="i4", row="i4")


Found = namedtuple("Found", "state hash candidates counts probable columns")
Scratch = namedtuple(
    "Scratch",
    "found context ranges many samples matches alignments about shortlist keys active seen "
    "node_inputs inputs extremes common probabilities frontier path_scores places place",
)


@lean
def _take(address, shape, dtype):
    """Return an array, and the next address on a cache line of its own."""
    array = array_at(address, shape, dtype)
    return array, (address + array.size * array.itemsize + 63) // 64 * 64


@lean
def scratch(address, max_nodes, max_sub_indices):
    """Return the learned scorer's arrays for trees of `max_nodes` nodes over `max_sub_indices` sub-indices, laid out
    from `address` on, and where they end. The memory is zero at first, then as the last draft left it. Arrays that own
    memory would count references, which takes longer than what is done with them."""
    n = max_nodes + 1
    state, at = _take(address, (2,), np.int64)
    entries, at = _take(at, (1 << _HASH_BITS,), _HASH)  # open addressing: row of each token; other stamps are empty
    candidates, at = _take(at, (MAX_CANDIDATES,), _CANDIDATE)
    # [c, i]: how often candidate i followed, by column, at most 64 times.
    counts, at = _take(at, (COLUMNS, MAX_CANDIDATES), np.uint8)
    probable, at = _take(at, (4, MAX_CANDIDATES), np.float64)  # by SHARE to PROMISE
    columns, at = _take(at, (COLUMNS,), _COLUMN)
    context, at = _take(at, (CONTEXT,), np.int32)  # the last tokens at the node, newest first, drafted ones included
    samples, at = _take(at, (MAX_SAMPLES,), np.int32)  # tokens sampled from the ranges of one order
    about, at = _take(at, (1,), _ABOUT)
    shortlist, at = _take(at, (SHORTLIST,), np.int32)  # rows of the most promising candidates, best first
    keys, at = _take(at, (recycled_logits.ORDERS,), np.uint64)  # of recycled logits
    active, at = _take(at, (NODE_INPUTS + INPUTS,), np.int32)  # inputs that are not 0
    seen, at = _take(at, (INPUTS,), np.int32)  # inputs that are counts, of columns with observations
    node_inputs, at = _take(at, (1, NODE_INPUTS), np.float32)
    inputs, at = _take(at, (SHORTLIST, INPUTS), np.float32)
    extremes, at = _take(at, (2, INPUTS), np.float32)  # the largest and least of each input among the shortlist
    common, at = _take(at, (WIDTH,), np.float32)  # share of the hidden layer common to all candidates of a node
    probabilities, at = _take(at, (SHORTLIST,), np.float64)
    place, at = _take(at, (1,), PLACE)  # one more that is looked at
    # [i, j, k - 1]: range in sub-index j of the last k tokens of node i's context; the last one: of many tokens.
    ranges, at = _take(at, (n, max_sub_indices, STORE_ORDERS + 1, 2), np.int32)
    many, at = _take(at, (n,), np.int32)  # how many these are; 0 for none
    matched, at = _take(at, (n, 1 + matches.MAX_MATCHES, 2), np.int32)  # see `matches.match_root`
    alignments, at = _take(at, (n, 1 + matches.MAX_ALIGNMENTS, 3), np.int32)  # see `matches.align_root`
    frontier, at = _take(at, (n,), _LEAF)  # the best nodes outside the tree, best first
    path_scores, at = _take(at, (n,), np.float64)  # score of each node of the tree
    places, at = _take(at, (n,), PLACE)  # which each node is copied on from
    found = Found(state, entries, candidates, counts, probable, columns)
    arrays = Scratch(
        found, context, ranges, many, samples, matched, alignments, about, shortlist, keys, active, seen,
        node_inputs, inputs, extremes, common, probabilities, frontier, path_scores, places, place,
    )  # fmt: skip
    return arrays, at


@lean
def size_of_scratch(max_nodes, max_sub_indices):
    """Return the bytes of memory of `scratch`."""
    return scratch(0, max_nodes, max_sub_indices)[1]


# Functions called per token take arrays as arguments: taking them out of a bundle counts references.


@lean
def _row(state, entries, candidates, token, may_add):
    """Return the row of `token`, added if allowed and possible; -1 for none, and for images."""
    if token < 0:
        return np.int64(-1)
    h = np.int64(((np.uint64(token) * np.uint64(2654435761)) & np.uint64(0xFFFFFFFF)) >> np.uint64(32 - _HASH_BITS))
    while entries[h].stamp == state[STAMP]:
        if entries[h].token == token:
            return np.int64(entries[h].row)
        h = (h + 1) & ((1 << _HASH_BITS) - 1)
    n = state[NUMBER]
    if not may_add or n >= MAX_CANDIDATES:
        return np.int64(-1)
    entry, candidate = entries[h], candidates[n]
    entry.stamp, entry.token, entry.row = state[STAMP], token, n
    candidate.token, candidate.match, candidate.since, candidate.cost = token, 0, -1, -1
    state[NUMBER] = n + 1
    return n


@lean
def _count(counts, columns, row, first, orders):
    """Count an occurrence of the candidate in `row` (-1: of one without a row) in `orders` columns."""
    for column in range(first, first + orders):
        columns[column].total += 1
        if row >= 0:
            if counts[column, row] == 0:
                columns[column].distinct += 1
            counts[column, row] += 1


@lean(inline="always")
def _count_store(scratch, table, ranges, many, skip, max_samples):
    """Sample a node's ranges at the token after the next `skip` (0 or 1), and count the samples of each order in its
    column, longest first. The order above STORE_ORDERS has `many` tokens. After a skipped token contexts of one token
    add no candidates."""
    state, entries, candidates, counts, _, columns = scratch.found
    samples = scratch.samples
    first_column, orders = (COLUMN.skip_store, SKIP_ORDERS) if skip else (COLUMN.store, STORE_ORDERS + 1)
    for k in range(orders - 1, -1, -1):
        column = first_column + k
        columns[column].total = sample(table, ranges, k, (many if k == MANY else k + 1) + skip, max_samples, samples)
        distinct, last, row = 0, np.int32(-1), np.int64(-1)
        for q in range(columns[column].total):
            token = samples[q]
            if token < 0:
                continue
            if token != last:
                last, row = token, _row(state, entries, candidates, token, k >= skip)
            if row >= 0:
                if counts[column, row] == 0:
                    distinct += 1
                counts[column, row] += 1
        columns[column].distinct = distinct


@lean(inline="always")
def write_matches(request, scratch, node, parent, context_length):
    """Write the matches and alignments of a node; its context is in `scratch`."""
    own, about = scratch.matches[node], scratch.about[0]
    if node == 0:
        longest = matches.match_root(request, own)
        about.run, about.evidence = matches.align_root(request, longest, scratch.alignments[0])
    elif context_length >= GRAM:
        matches.match_child(request, scratch.matches[parent], own, scratch.context)
        matches.align_child(request, scratch.alignments[parent], scratch.alignments[node], scratch.context[0])
    else:
        own[0, 0] = scratch.alignments[node, 0, 0] = 0


@lean(inline="always")
def _count_matches(request, scratch, node):
    """Count the tokens after the matches at a node, by length, and find those after alignments."""
    tokens, about, own = request.tokens, scratch.about[0], scratch.matches[node]
    state, entries, candidates, counts, _, columns = scratch.found
    about.longest = about.newest = -1
    longest = 0
    for m in range(1, 1 + own[0, 0]):
        match, orders = own[m, LENGTH], 0
        row = _row(state, entries, candidates, tokens[own[m, POSITION] + 1], True)
        while orders < len(LONG_ORDERS) and match >= LONG_ORDERS[orders]:
            orders += 1
        _count(counts, columns, row, COLUMN.request + SHORT_ORDERS, orders)
        if row >= 0:
            candidates[row].match = max(candidates[row].match, match)
            if m == 1:
                about.newest = row
            if match > longest:
                longest = match
                about.longest = row
    alignments = scratch.alignments[node]
    for m in range(1, 1 + alignments[0, 0]):
        row = _row(state, entries, candidates, tokens[alignments[m, POSITION] + 1], True)
        if row >= 0 and alignments[m, SINCE] > candidates[row].since:
            candidates[row].since, candidates[row].edit = alignments[m, SINCE], alignments[m, EDIT]


@lean(inline="always")
def _count_occurrences(request, scratch, skip, context_length):
    """Count the tokens after the request's own occurrences of a node's context, without its last token if `skip` is 1:
    then contexts of one token add no candidates."""
    tokens, previous, context = request.tokens, request.previous, scratch.context
    state, entries, candidates, counts, _, columns = scratch.found
    first_column, orders = (COLUMN.skip_request, 2) if skip else (COLUMN.request, SHORT_ORDERS)
    longest = min(orders, context_length - skip)
    i, seen = request.heads[find(request, context[skip])], 0
    while i >= 0 and seen < OCCURRENCES:
        if i < len(tokens) - 1 - skip:
            seen += 1
            match = 1
            while match < longest and i >= match and tokens[i - match] == context[match + skip]:
                match += 1
            row = _row(state, entries, candidates, tokens[i + 1 + skip], match > skip)
            _count(counts, columns, row, first_column, match)
        i = previous[i]


@lean(inline="always")
def gather(sources, scratch, node, parent, max_samples, context_length):
    """Count the candidates at one node, by source and context length.

    Args:
        sources: a `learned.Sources`.
        scratch: in: the node's ranges, matches and the first `context_length` tokens of the context; out: `found`,
            except the fields of `learned.score`.
        node, parent: nodes with the ranges of this context, and of the context without its last token (-1: none).
        max_samples: suffixes sampled per range.

    Returns:
        The context length at which recycled logits were found, 0 for none.
    """
    request, store, recycled = sources.request, sources.store, sources.recycled
    about, many, ranges = scratch.about[0], scratch.many[node], scratch.ranges
    state, entries, candidates, counts, _, columns = scratch.found
    state[STAMP] += 1
    state[NUMBER] = 0
    counts[:] = 0
    for column in range(COLUMNS):
        columns[column].total = columns[column].distinct = 0
    _count_store(scratch, store.table, ranges[node], many, 0, max_samples)
    about.follower, about.learnt = newest_follower(store.table, ranges[node], many, max_samples)
    _count_occurrences(request, scratch, 0, context_length)
    _count_matches(request, scratch, node)
    if parent >= 0:
        _count_store(scratch, store.table, ranges[parent], 0, 1, max_samples)
    if context_length >= 3:
        _count_occurrences(request, scratch, 1, context_length)
    order, at = recycled_logits.find(recycled, scratch.context, context_length, scratch.keys)
    if order > 0:
        entry = recycled.entries[at]
        for k in range(recycled_logits.TOP):
            if entry.costs[k] == recycled_logits.MAX_COST:
                break
            row = _row(state, entries, candidates, entry.tokens[k], True)
            if row >= 0:
                candidates[row].cost = entry.costs[k]
    return order
