"""Counts of what followed this context before: one row per candidate token, gathered from every source at one node."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freedraft.compiled import compiled
from sssd_plugin import recycled_logits
from sssd_plugin.request_index import GRAM, find
from sssd_plugin.scoring.matches import (
    KIND,
    LENGTH,
    MAX_ALIGNMENTS,
    MAX_MATCHES,
    POSITION,
    SINCE,
    align_child,
    align_root,
    match_child,
    match_root,
)
from sssd_plugin.scoring.ranges import STORE_ORDERS, newest_follower, sample_orders
from sssd_plugin.scoring.views import record
from sssd_plugin.scoring.weights import INPUTS, NODE_INPUTS, WIDTH

SHORT_ORDERS = 3  # contexts of 1 to 3 tokens are looked up in the request by their last token
LONG_ORDERS = np.array([4, 5, 6, 8, 16, 32])  # and longer ones by their last four: tokens that match, at least
ORDERS = SHORT_ORDERS + len(LONG_ORDERS)
CONTEXT = 6  # last tokens at a node that are written down
SKIP_ORDERS = 3  # contexts in the store that leave out the last token
MAX_CANDIDATES = 256
MAX_SAMPLES = 64  # suffixes looked at per range
OCCURRENCES = 64  # newest occurrences of a single token in the request that are looked at
SHORTLIST = 16
_HASH_BITS = 9

# Columns of the counts: store orders 1-4 and many, request orders, then contexts that skip their last token.
STORE, INPUT = 0, STORE_ORDERS + 1
SKIP_STORE = INPUT + ORDERS
SKIP_INPUT = SKIP_STORE + SKIP_ORDERS
COLUMNS = SKIP_INPUT + 2
_ROW = 32  # bytes of a row of counts; every count is at most 64

_HASH = np.dtype([("stamp", "i8"), ("token", "i4"), ("row", "i4")], align=True)
_CANDIDATE = record("share store input promise", "token match since kind cost")
_COLUMN = record("scale back_off", "total kinds")
_LEAF = record("score", "parent token kind")


class Scratch(NamedTuple):
    """Preallocated arrays of the learned scorer; N = the largest tree's nodes + 1, J = sub-indices at most."""

    clock: NDArray[np.int64]  # [1], calls of `gather` so far; entries of `hash` with another stamp are empty
    hash: NDArray[Any]  # [2^9], open addressing: row of each token among the candidates
    # [MAX_CANDIDATES], the token; its share of the store's tokens; its probability interpolated over the store's
    # orders, and over the request's; what the shortlist is chosen by; tokens of its longest match, 0 for none; of its
    # alignment the tokens equal since the edit, -1 for none, and the kind of edit; what it costs by recycled logits
    # (`recycled_logits.ENTRY`), -1 where it is not among the likeliest.
    candidates: NDArray[Any]
    counts: NDArray[np.uint8]  # [MAX_CANDIDATES, _ROW], how often each candidate followed, by column
    columns: NDArray[Any]  # [COLUMNS], observations, distinct tokens among them; the terms that interpolate them
    context: NDArray[np.int32]  # [CONTEXT], the last tokens at the node, newest first, drafted ones included
    # [N, J, STORE_ORDERS + 1, 2]; [i, j, k - 1] is the range of the last k tokens of node i's context, and the last one
    # that of many tokens.
    ranges: NDArray[np.int32]
    many: NDArray[np.int32]  # [N], how many these are; 0 for none
    # [N, STORE_ORDERS + 1, 1 + MAX_SAMPLES], number of samples of a range, then the token at each; 0 where `gather` has
    # not seen the node.
    samples: NDArray[np.int32]
    skip_samples: NDArray[np.int32]  # [SKIP_ORDERS, 1 + MAX_SAMPLES], the same for contexts that skip their last token
    matches: NDArray[np.int32]  # [N, 1 + MAX_MATCHES, 2], see `matches.match_root`
    alignments: NDArray[np.int32]  # [N, 1 + MAX_ALIGNMENTS, 3], see `matches.align_root`
    # [6], rows of the candidates of the longest match and of the newest one, -1 for none; what `align_root` returns;
    # what `newest_follower` returns.
    leading: NDArray[np.int32]
    shortlist: NDArray[np.int32]  # [SHORTLIST], rows of the most promising candidates, best first
    keys: NDArray[np.uint64]  # [ORDERS], of recycled logits
    seen: NDArray[np.int32]  # [COLUMNS, 2], inputs of columns with observations, and these columns
    node_inputs: NDArray[np.float32]  # [1, NODE_INPUTS]
    inputs: NDArray[np.float32]  # [SHORTLIST, INPUTS]
    largest: NDArray[np.float32]  # [1, INPUTS], the largest of each input among the shortlist
    common: NDArray[np.float32]  # [WIDTH], what the candidates of a node share of the hidden layer
    hidden: NDArray[np.float32]  # [WIDTH], of one candidate
    probabilities: NDArray[np.float64]  # [SHORTLIST]
    frontier: NDArray[Any]  # [N], the best nodes that are not in the tree yet, best first
    path_scores: NDArray[np.float64]  # [N], score of each node of the tree


def scratch(max_nodes: int, max_sub_indices: int) -> Scratch:
    """Allocate scratch space for trees of up to `max_nodes` nodes over up to `max_sub_indices` sub-indices."""
    n = max_nodes + 1
    return Scratch(
        np.zeros(1, np.int64),
        np.zeros(1 << _HASH_BITS, _HASH),
        np.zeros(MAX_CANDIDATES, _CANDIDATE),
        np.zeros((MAX_CANDIDATES, _ROW), np.uint8),
        np.zeros(COLUMNS, _COLUMN),
        np.zeros(CONTEXT, np.int32),
        np.zeros((n, max_sub_indices, STORE_ORDERS + 1, 2), np.int32),
        np.zeros(n, np.int32),
        np.zeros((n, STORE_ORDERS + 1, 1 + MAX_SAMPLES), np.int32),
        np.zeros((SKIP_ORDERS, 1 + MAX_SAMPLES), np.int32),
        np.zeros((n, 1 + MAX_MATCHES, 2), np.int32),
        np.zeros((n, 1 + MAX_ALIGNMENTS, 3), np.int32),
        np.zeros(6, np.int32),
        np.zeros(SHORTLIST, np.int32),
        np.zeros(recycled_logits.ORDERS, np.uint64),
        np.zeros((COLUMNS, 2), np.int32),
        np.zeros((1, NODE_INPUTS), np.float32),
        np.zeros((SHORTLIST, INPUTS), np.float32),
        np.zeros((1, INPUTS), np.float32),
        np.zeros(WIDTH, np.float32),
        np.zeros(WIDTH, np.float32),
        np.zeros(SHORTLIST),
        np.zeros(n, _LEAF),
        np.zeros(n),
    )


@compiled(nogil=True)
def _row(token, may_add, stamp, entries, candidates, counts, n):
    """Return the row of `token` among the n candidates, -1 if it has none and gets none, and their number then. What is
    no token (`OUTSIDE`) gets none."""
    if token < 0:
        return np.int64(-1), n
    h = np.int64(((np.uint64(token) * np.uint64(2654435761)) & np.uint64(0xFFFFFFFF)) >> np.uint64(32 - _HASH_BITS))
    while entries[h].stamp == stamp:
        if entries[h].token == token:
            return np.int64(entries[h].row), n
        h = (h + 1) & ((1 << _HASH_BITS) - 1)
    if not may_add or n >= MAX_CANDIDATES:
        return np.int64(-1), n
    entries[h].stamp = stamp
    entries[h].token = token
    entries[h].row = n
    candidate = candidates[n]
    candidate.token, candidate.match, candidate.since, candidate.cost = token, 0, -1, -1
    counts[n, :] = 0
    return np.int64(n), n + 1


@compiled(nogil=True, inline="always")
def _count_orders(samples, first_column, min_adding, scratch, n):
    """Count the samples of each order in its column, longest first, of which those from `min_adding` on add candidates;
    return the candidates' number."""
    stamp, entries, candidates = scratch.clock[0], scratch.hash, scratch.candidates
    counts, columns = scratch.counts, scratch.columns
    for k in range(len(samples) - 1, -1, -1):
        column = first_column + k
        if samples[k, 0] < 0:
            columns[column] = columns[column + 1]
            for c in range(n):
                counts[c, column] = counts[c, column + 1]
            for q in range(1 + samples[k + 1, 0]):
                samples[k, q] = samples[k + 1, q]
            continue
        columns[column].total = samples[k, 0]
        kinds, last, row = 0, np.int32(-1), np.int64(-1)
        for q in range(1, 1 + samples[k, 0]):
            token = samples[k, q]
            if token < 0:
                continue
            if token != last:
                last = token
                row, n = _row(token, k >= min_adding, stamp, entries, candidates, counts, n)
            if row >= 0:
                if counts[row, column] == 0:
                    kinds += 1
                counts[row, column] += 1
        columns[column].kinds = kinds
    return n


@compiled(nogil=True, inline="always")
def _count_matches(request, scratch, node, parent, context_length, n, any_new):
    """Count what followed the matches at a node, by their length, and look for alignments; return the candidates'
    number. `any_new` says whether there may be matches that the parent has not."""
    tokens, candidates, counts, columns = request.tokens, scratch.candidates, scratch.counts, scratch.columns
    stamp, entries, matches, leading = scratch.clock[0], scratch.hash, scratch.matches[node], scratch.leading
    leading[:2] = -1
    if node == 0:
        matches[0, 0] = 0
        longest = match_root(request, matches) if any_new else 0
        leading[2], leading[3] = align_root(request, longest, scratch.alignments[0])
    elif context_length >= GRAM:
        match_child(request, scratch.matches[parent], matches, scratch.context, any_new)
        align_child(request, scratch.alignments[parent], scratch.alignments[node], scratch.context[0])
    else:
        matches[0, 0] = scratch.alignments[node, 0, 0] = 0
    longest = 0
    for m in range(1, 1 + matches[0, 0]):
        match, first = matches[m, LENGTH], INPUT + SHORT_ORDERS
        row, n = _row(tokens[matches[m, POSITION] + 1], True, stamp, entries, candidates, counts, n)
        for k in range(len(LONG_ORDERS)):
            if match < LONG_ORDERS[k]:
                break
            columns[first + k].total += 1
            if row >= 0:
                if counts[row, first + k] == 0:
                    columns[first + k].kinds += 1
                counts[row, first + k] += 1
        if row >= 0:
            candidates[row].match = max(candidates[row].match, match)
            if m == 1:
                leading[1] = row
            if match > longest:
                longest = match
                leading[0] = row
    return n


@compiled(nogil=True, inline="always")
def gather(store, request, scratch, node, parent, max_samples, context_length):
    """Count the candidates at one node, by source and context length, and return their number.

    Args:
        scratch: the node's ranges and the first `context_length` tokens of the context are read; its samples, the
            candidates' tokens and counts, and the columns' totals and kinds are written.
        node, parent: nodes with the ranges of this context, and of it without its last token (-1: there is none).
        max_samples: suffixes sampled per range.
    """
    scratch.clock[0] += 1
    stamp, entries, candidates = scratch.clock[0], scratch.hash, scratch.candidates
    counts, columns, context = scratch.counts, scratch.columns, scratch.context
    tokens, previous, alignments = request.tokens, request.previous, scratch.alignments[node]
    length = len(tokens)
    for column in range(COLUMNS):
        columns[column].total = 0
        columns[column].kinds = 0
    samples = scratch.samples[node]
    sample_orders(store.table, scratch.ranges, node, STORE_ORDERS + 1, scratch.many[node], 0, max_samples, samples)
    if parent >= 0:
        sample_orders(store.table, scratch.ranges, parent, SKIP_ORDERS, 0, 1, max_samples, scratch.skip_samples)
    n = _count_orders(samples, STORE, 0, scratch, 0)
    newest, learnt = newest_follower(store, scratch.ranges, node, scratch.many[node], max_samples)
    scratch.leading[4], scratch.leading[5] = newest, learnt

    i = request.heads[find(request, context[0])]
    seen, longest = 0, 0
    while i >= 0 and seen < OCCURRENCES:
        if i < length - 1:
            seen += 1
            match = 1
            while match < min(SHORT_ORDERS, context_length) and i >= match and tokens[i - match] == context[match]:
                match += 1
            longest = max(longest, match)
            row, n = _row(tokens[i + 1], True, stamp, entries, candidates, counts, n)
            for k in range(match):
                columns[INPUT + k].total += 1
                if row >= 0:
                    if counts[row, INPUT + k] == 0:
                        columns[INPUT + k].kinds += 1
                    counts[row, INPUT + k] += 1
        i = previous[i]

    # Longer matches are among these, unless there are more of them.
    n = _count_matches(request, scratch, node, parent, context_length, n, longest == SHORT_ORDERS or i >= 0)

    for m in range(1, 1 + alignments[0, 0]):
        row, n = _row(tokens[alignments[m, POSITION] + 1], True, stamp, entries, candidates, counts, n)
        if row >= 0 and alignments[m, SINCE] > candidates[row].since:
            candidates[row].since = alignments[m, SINCE]
            candidates[row].kind = alignments[m, KIND]

    if parent >= 0:
        n = _count_orders(scratch.skip_samples, SKIP_STORE, 1, scratch, n)

    if context_length >= 3:
        i = request.heads[find(request, context[1])]
        seen = 0
        while i >= 0 and seen < OCCURRENCES:
            if i < length - 2:
                seen += 1
                two = i >= 1 and tokens[i - 1] == context[2]
                columns[SKIP_INPUT].total += 1
                row, n = _row(tokens[i + 2], two, stamp, entries, candidates, counts, n)
                if two:
                    columns[SKIP_INPUT + 1].total += 1
                if row >= 0:
                    counts[row, SKIP_INPUT] += 1
                    if two:
                        counts[row, SKIP_INPUT + 1] += 1
            i = previous[i]
    return n


@compiled(nogil=True, inline="always")
def gather_recycled(recycled, scratch, context_length, n):
    """Add the likeliest tokens by recycled logits to the n candidates of a node; return the candidates' number, and the
    number of last tokens that the logits were found by, 0 for none."""
    order, at = recycled_logits.find(recycled, scratch.context, context_length, scratch.keys)
    if order > 0:
        entry, candidates = recycled.entries[at], scratch.candidates
        for k in range(recycled_logits.TOP):
            if entry.costs[k] == recycled_logits.MAX_COST:
                break
            row, n = _row(entry.tokens[k], True, scratch.clock[0], scratch.hash, candidates, scratch.counts, n)
            if row >= 0:
                candidates[row].cost = entry.costs[k]
    return n, order
