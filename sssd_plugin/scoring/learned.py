"""The learned scorer: a small network over the counts at a node; its scores are calibrated probabilities.

Functions called once per node are inlined: calls copy their bundles of arrays.

The paper samples whole continuations once, at the root, and merges the sources with fixed discounts (arXiv 2411.05894,
Algorithm 3). This scorer queries every source at every node, with learnt weights.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from freedraft.compiled import compiled, lean
from freedraft.cost.acceptance import KINDS
from sssd_plugin.datastore.index.sub_index import SOURCE
from sssd_plugin.pointers import array_at
from sssd_plugin.recycled_logits import SCALE, Recycled
from sssd_plugin.request_index import Request, request_at
from sssd_plugin.scoring import paper
from sssd_plugin.scoring.candidates import (
    BY_REQUEST,
    BY_STORE,
    MAX_SAMPLES,
    NUMBER,
    PROMISE,
    SHARE,
    SHORTLIST,
    gather,
    scratch,
    write_matches,
)
from sssd_plugin.scoring.inputs import COLUMN, NODE_KINDS, REQUEST_ORDERS, STORE_ORDERS
from sssd_plugin.scoring.matches import LENGTH, POSITION
from sssd_plugin.scoring.network import evaluate, write_inputs, write_node_inputs
from sssd_plugin.scoring.places import (
    NOWHERE,
    find_in_request,
    find_in_store,
    go_on,
    kind_of,
    next_token,
    share_of,
    source_at,
)
from sssd_plugin.scoring.ranges import advance, find_many
from sssd_plugin.scoring.views import Store, Tree, add_node, store_of, write_context
from sssd_plugin.sources import OTHER

DEEP_SAMPLES = 8  # suffixes sampled per range below the root (at the root MAX_SAMPLES)
FEW_NODES = 16  # larger trees use more candidates and samples, and look for them longer
FEW_CANDIDATES = 10
FEW_BELOW, CHAIN_BELOW = 8, 3  # candidates of nodes below the root of such trees, and of chains
CHOICE, CHAIN_CHOICE = 0.015, 0.03  # path scores below which drafts are only copied on; chains: that a copy may lose
FLOOR = 0.002  # path score below which nothing is drafted any more
STORE_DISCOUNT = 0.7
REQUEST_DISCOUNT = 0.4
COPY_MARGIN, EXPAND_MARGIN = 0.7, 0.35  # hoped-for share of a node's probability of its best child: copies, others
ALIGNED = 0.2  # bonus of an alignment in the shortlist's criterion
RECYCLED = 0.3  # weight of a probability by recycled logits there


# Of a request that is drafted for, see `draft_batch`; where its predicted answer begins and ends in its text.
SLOT, GROUP, TENANT, PREDICTED, PREDICTED_END, REQUEST_COLUMNS = range(6)


class Sources(NamedTuple):
    request: Request
    store: Store
    recycled: Recycled
    predicted: tuple[int, int]  # where a predicted answer begins and ends in the request's text


@lean
def _write_shares_of_store(store, candidates, shares, n):
    shares[:n] = 0.0
    for j in range(len(store.table)):
        size = store.table[j, 5]
        starts = array_at(store.table[j, 2], (size + 1,), np.int32)
        for c in range(n):
            token = candidates[c].token
            if token < size:
                shares[c] += starts[token + 1] - starts[token]
    per_token = 1.0 / max(store.size, 1)
    for c in range(n):
        shares[c] *= per_token


@lean
def _interpolate(columns, counts, first, orders, discount, p, n):
    """Replace p[:n] by max(count - discount, 0) / total + (discount * distinct / total) * p, the shortest context
    first. Returns the longest order seen."""
    longest = 0
    for k in range(first, first + orders):
        column, count = columns[k], counts[k]
        if column.total > 0:
            longest = k + 1 - first
            scale = 1.0 / column.total
            back_off = discount * column.distinct * scale
            for c in range(n):
                p[c] = max(count[c] - discount, 0.0) * scale + back_off * p[c]
    return longest


@lean(inline="always")
def _choose(store, scratch, limit):
    """Write the shortlist, at most `limit` of the candidates; return its length and both longest orders."""
    state, _, candidates, counts, probable, columns = scratch.found
    shortlist, n = scratch.shortlist, state[NUMBER]
    by_store, by_request, promise = probable[BY_STORE], probable[BY_REQUEST], probable[PROMISE]
    _write_shares_of_store(store, candidates, probable[SHARE], n)
    for c in range(n):
        by_store[c], by_request[c] = probable[SHARE, c] + 1e-7, 1e-4
    store_order = _interpolate(columns, counts, COLUMN.store, STORE_ORDERS + 1, STORE_DISCOUNT, by_store, n)
    request_order = _interpolate(columns, counts, COLUMN.request, REQUEST_ORDERS, REQUEST_DISCOUNT, by_request, n)
    skip_store = 0.1 / max(columns[COLUMN.skip_store + 1].total, 1)
    skip_request = 0.1 / max(columns[COLUMN.skip_request + 1].total, 1)
    of_store, of_request = counts[COLUMN.skip_store + 1], counts[COLUMN.skip_request + 1]
    for c in range(n):
        v = 0.6 * by_request[c] + 0.4 * by_store[c]
        promise[c] = v + skip_store * of_store[c] + skip_request * of_request[c]
    m = 0
    for c in range(n):
        candidate, v = candidates[c], promise[c]
        if candidate.since >= 0:
            v += ALIGNED
        if candidate.cost >= 0:
            v += RECYCLED * math.exp(candidate.cost * (-1 / SCALE))
        promise[c] = v
        if m < limit:
            i = m
            m += 1
        elif v > promise[shortlist[m - 1]]:
            i = m - 1
        else:
            continue
        while i > 0 and promise[shortlist[i - 1]] < v:
            shortlist[i] = shortlist[i - 1]
            i -= 1
        shortlist[i] = c
    return m, store_order, request_order


@lean(inline="always")
def _source_of(sources, scratch, node, store_order, request_order):
    """Return where a node's longest context is, up to four tokens of the store's: the newest text there, or the longest
    match of the request."""
    table, ranges, matches = sources.store.table, scratch.ranges[node], scratch.matches[node]
    source, longest, at = OTHER, 0, -1
    if min(store_order, STORE_ORDERS) > request_order:
        for j in range(len(table)):
            if ranges[j, store_order - 1, 0] < ranges[j, store_order - 1, 1]:
                source = table[j, SOURCE]
    elif request_order > 0:
        for m in range(1, 1 + matches[0, 0]):
            if matches[m, LENGTH] > longest:
                longest, at = matches[m, LENGTH], matches[m, POSITION]
        source = source_at(sources.predicted, at)
    return source


@lean(inline="always")
def score(sources, scratch, node, order, limit, weights):
    """Score the most promising candidates of `gather` at a node, at most `limit`.

    Writes the shortlist, its inputs and probabilities P(next token = candidate), which sum to 1 with P(none of these).
    Returns the length of the shortlist, and the node's kind with its source. order: result of `gather`.
    """
    m, store_order, request_order = _choose(sources.store, scratch, limit)
    kind = min(store_order, STORE_ORDERS) * (REQUEST_ORDERS + 1) + request_order + (NODE_KINDS if order > 0 else 0)
    kind += KINDS * _source_of(sources, scratch, node, store_order, request_order)
    if m == 0:
        return m, kind
    write_node_inputs(scratch, node, store_order, request_order, order)
    write_inputs(sources.request, scratch, node, m)
    evaluate(scratch, m, weights[0], weights[1])
    probabilities, top = scratch.probabilities, 0.0
    for i in range(m):
        top = max(top, probabilities[i])
    total = math.exp(-top)
    for i in range(m):
        probabilities[i] = math.exp(probabilities[i] - top)
        total += probabilities[i]
    for i in range(m):
        probabilities[i] /= total
    return m, kind


@lean(inline="always")
def start(sources, scratch):
    """Write the ranges of node 0, the root; return the node of its context without its last token, -1 for none."""
    tokens, table, ranges = sources.request.tokens, sources.store.table, scratch.ranges
    length, before, here = len(tokens), len(ranges) - 1, -1
    first = max(0, length - STORE_ORDERS)
    for i in range(first, length):  # one token at a time: returns the last node but one
        target = 0 if (length - 1 - i) % 2 == 0 else before
        advance(table, ranges, scratch.many, here, target, tokens[i])
        here = target
    scratch.many[0] = find_many(table, ranges[0], tokens)
    return before if length - first > 1 else -1


@lean
def _insert(frontier, pending, capacity, score, parent, token, kind):
    """Insert a leaf in order of descending score, after its equals; return the number held, at most `capacity`."""
    if pending < capacity:
        k = pending
        pending += 1
    elif capacity > 0 and score > frontier[pending - 1].score:
        k = pending - 1
    else:
        return pending
    while k > 0 and frontier[k - 1].score < score:
        frontier[k] = frontier[k - 1]
        k -= 1
    leaf = frontier[k]
    leaf.score, leaf.parent, leaf.token, leaf.kind = score, parent, token, kind
    return pending


@lean
def effort_of(max_nodes, chain):
    """Return the most candidates of the root and of other nodes, and the samples per range of the latter, in drafts of
    this size; and the path score below which no candidates are looked for."""
    if chain:
        return FEW_CANDIDATES, CHAIN_BELOW, DEEP_SAMPLES, CHAIN_CHOICE
    if max_nodes <= FEW_NODES:
        return FEW_CANDIDATES, FEW_BELOW, DEEP_SAMPLES, CHOICE
    return SHORTLIST, SHORTLIST, 2 * DEEP_SAMPLES, CHOICE / 2


@lean(inline="always")
def look_back(sources, tree, scratch, node, parent):
    """Write the context, ranges (below the root) and matches of a node; return the length of the context."""
    request = sources.request
    filled = write_context(request.tokens, tree.tokens, tree.parents, node, scratch.context)
    if node > 0:
        advance(sources.store.table, scratch.ranges, scratch.many, parent, node, tree.tokens[node])
    write_matches(request, scratch, node, parent, filled)
    return filled


@lean(inline="always")
def expand(sources, weights, scratch, node, parent, effort, filled):
    """Score the tokens after a node of the tree: see `gather`, `score` and `effort_of`; filled: of `look_back`."""
    at_root, below, samples, _ = effort
    order = gather(sources, scratch, node, parent, samples if node else MAX_SAMPLES, filled)
    return score(sources, scratch, node, order, below if node else at_root, weights)


@lean(inline="always")
def _place(sources, copies, tree, scratch, node, filled, choice):
    """Write the place that a node is copied on from, the surer one of request and store; NOWHERE if `choice` of score
    or more may be lost by it. If the path's score is not less, only long matches are looked at."""
    place, other, request = scratch.places[node], scratch.place[0], sources.request
    any_length = scratch.path_scores[node] < choice
    find_in_request(
        request, scratch.matches[node], scratch.context, filled if any_length else 0, tree.depths[node], place
    )
    find_in_store(sources.store.table, scratch.ranges[node], scratch.many[node], any_length, other)
    share = share_of(place, copies)
    if share_of(other, copies) > share:
        scratch.places[node] = other
        share = share_of(other, copies)
    if scratch.path_scores[node] * (1.0 - share) >= choice:
        place.text = NOWHERE


@lean
def draft_tree(sources, weights, limits, tree, scratch):
    """Draft a tree best-first, by the product of scores along paths; return the number of nodes.

    Args:
        sources, scratch: `Sources`, `Scratch`.
        weights: layer, out and copies, as in `Weights`.
        limits: largest number of nodes, root included; whether to extend only the newest node, by its best candidate.
        tree: output; a node's kind encodes its longest contexts in store and request (see `inputs.NODE_KINDS`) and,
            above `KINDS`, its source.
    """
    (tokens, table, (max_nodes, chain)), copies = (sources.request.tokens, sources.store.table, limits), weights[2]
    if len(tokens) == 0:
        return 0
    frontier, path_scores, probabilities = scratch.frontier, scratch.path_scores, scratch.probabilities
    candidates, shortlist, places = scratch.found.candidates, scratch.shortlist, scratch.places
    matches, alignments = scratch.matches, scratch.alignments
    root_parent = start(sources, scratch)
    add_node(tree, 0, tokens[-1], -1, 1.0, 0)
    path_scores[0], places[0].text = 1.0, NOWHERE
    n, pending, current = 1, 0, 0
    effort = effort_of(max_nodes, chain)
    while n < max_nodes:
        capacity = max_nodes - n
        hopeless = current > 0 and not chain and pending >= capacity
        if hopeless:
            above = tree.parents[current]
            copied = places[current].text != NOWHERE or matches[above, 0, 0] + alignments[above, 0, 0] > 0
            margin = COPY_MARGIN if copied else EXPAND_MARGIN
            hopeless = path_scores[current] * margin <= frontier[capacity - 1].score
        pending = 0 if chain else min(pending, capacity)
        if not hopeless and path_scores[current] >= FLOOR:
            place = places[current]
            if place.text == NOWHERE:
                parent = tree.parents[current] if current > 0 else root_parent
                filled = look_back(sources, tree, scratch, current, parent)
                if path_scores[current] < effort[3] or (chain and alignments[current, 0, 0] == 0):
                    _place(sources, copies, tree, scratch, current, filled, effort[3])
            if place.text != NOWHERE:
                token, value = next_token(sources.request, table, place), path_scores[current] * share_of(place, copies)
                if token >= 0:
                    pending = _insert(frontier, pending, capacity, value, current, token, kind_of(sources, place))
            elif path_scores[current] >= effort[3]:
                m, kind = expand(sources, weights, scratch, current, parent, effort, filled)
                for i in range(m):
                    value = path_scores[current] * probabilities[i]
                    pending = _insert(frontier, pending, capacity, value, current, candidates[shortlist[i]].token, kind)
        if pending == 0:
            break
        leaf = frontier[0]
        add_node(tree, n, leaf.token, leaf.parent, leaf.score, leaf.kind)
        path_scores[n], places[n].text = leaf.score, NOWHERE
        if places[leaf.parent].text != NOWHERE:
            go_on(sources.request, places[leaf.parent], places[n])
        current = n
        n += 1
        pending -= 1
        for i in range(pending):
            frontier[i] = frontier[i + 1]
    return n


@compiled(nogil=True)
def draft_batch(arrays, memory, slots, view, entries, limits, weights):
    """Fill a `DraftBatch` for the requests of a batch; a slot of -1 gets a tree of 0 nodes.

    Bundles are passed from Python as plain tuples, which numba unpacks faster than named ones.

    Args:
        arrays: int64 [B, REQUEST_COLUMNS]; those of the `DraftBatch`.
        memory: of `scratch`, uint8.
        slots: `RequestIndex.slots`.
        view: see `views.store_of`, then `View.widest`; entries: of recycled logits, none to draft without.
        limits: as of `draft_tree`; weights: layer, out and copies, as in `Weights`; None: by the paper's scorer. Only
            one of the scorers is compiled.
    """
    asked, tokens, parents, depths, scores, counts, kinds = arrays
    if weights is None:
        tries = paper.scratch()
    else:
        arrays_of_nodes, _ = scratch(memory.ctypes.data, limits[0], view[2])
    for b in range(len(asked)):
        counts[b] = 0
        if asked[b, SLOT] >= 0:
            request, store = request_at(slots, asked[b, SLOT]), store_of(view[:2], asked[b, GROUP])
            tree = Tree(tokens[b], parents[b], depths[b], scores[b], kinds[b])
            if weights is None:
                counts[b] = paper.draft_tree(request, store, limits, tree, tries)
            else:
                own = asked[b, PREDICTED], asked[b, PREDICTED_END]
                sources = Sources(request, store, Recycled(entries, asked[b, TENANT]), own)
                counts[b] = draft_tree(sources, weights, limits, tree, arrays_of_nodes)
