"""The paper's scorer: arXiv 2411.05894, Algorithms 1-3, with their constants.

Algorithm 1 looks the last 1..P tokens up in the request, Algorithm 2 the last P (then fewer) in the datastore,
Algorithm 3 merges the continuations by count ratios, discounted by source and match length. Scores are not calibrated.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freedraft.compiled import compiled
from sssd_plugin.datastore.index.search import find_ngram, suffixes_of
from sssd_plugin.request_index import find
from sssd_plugin.scoring.views import add_node, record

PREFIX = 4  # P: the longest context looked up
OCCURRENCES = 128  # newest occurrences in the request
GRAM = 8  # longest n-gram kept of the request, prefix included
BRANCH = 10  # longest continuation from the datastore
SAMPLES = 100
MIN_SAMPLES = 20  # of one sub-index
ENOUGH = 50  # trie nodes after which the prefix is not shortened further
INPUT_DISCOUNT = 0.6

_MAX_STORE = 4096
_MAX_INPUT = OCCURRENCES * GRAM
SIZE, PUSHED = range(2)

_NODE = record("", "token first last next")
_ENTRY = record("score", "order node match parent")


class Trie(NamedTuple):
    """Continuations of a context; node 0 is the root."""

    # Token; first child; child that was inserted or found last; next sibling: -1 for none.
    nodes: NDArray[Any]
    # int32 [N, PREFIX], continuations through each node; of the request's, those behind a match of at least m + 1
    # tokens.
    counts: NDArray[np.int32]
    used: NDArray[np.int32]  # [1], number of nodes


class Heap(NamedTuple):
    """Candidates for the tree; those of match 0 are nodes of `Scratch.store`, the others of `Scratch.input`."""

    entries: NDArray[Any]
    ends: NDArray[np.int64]  # [2], entries held, and pushed so far


class Scratch(NamedTuple):
    """Preallocated arrays of the paper's scorer."""

    store: Trie  # siblings in the order of their tokens
    input: Trie  # siblings in the order in which they were met
    heap: Heap


@compiled(nogil=True)
def _trie(size):
    return Trie(np.empty(size, _NODE), np.empty((size, PREFIX), np.int32), np.empty(1, np.int32))


@compiled(nogil=True)
def scratch():
    """Allocate scratch space."""
    heap = Heap(np.empty(_MAX_STORE + PREFIX * _MAX_INPUT, _ENTRY), np.empty(2, np.int64))
    return Scratch(_trie(_MAX_STORE), _trie(_MAX_INPUT), heap)


@compiled(nogil=True)
def _child(nodes, counts, used, node, token, is_sorted):
    """Return the child of a node of a trie for `token`, a new one if there is none, -1 if there is no room for it."""
    before, child, last = -1, nodes[node].first, nodes[node].last
    if is_sorted:
        if last >= 0 and nodes[last].token <= token:  # tokens mostly come in their order
            child = last
        while child >= 0 and nodes[child].token < token:
            before, child = child, nodes[child].next
    else:
        while child >= 0 and nodes[child].token != token:
            before, child = child, nodes[child].next
    if child < 0 or nodes[child].token != token:
        new = used[0]
        if new >= len(nodes):
            return -1
        used[0] = new + 1
        made = nodes[new]
        made.token, made.first, made.last, made.next = token, -1, -1, child
        for m in range(PREFIX):
            counts[new, m] = 0
        if before >= 0:
            nodes[before].next = new
        else:
            nodes[node].first = new
        child = new
    nodes[node].last = child
    return child


@compiled(nogil=True)
def _clear(trie):
    trie.nodes[0].first = trie.nodes[0].last = -1
    trie.counts[0, :] = 0
    trie.used[0] = 1


@compiled(nogil=True)
def _insert_samples(trie, tokens, suffixes, lo, hi, offset, take):
    """Insert what follows evenly spaced suffixes of [lo, hi) into the trie."""
    nodes, counts, used = trie
    for q in range(take):
        at, node = suffixes[lo + (q * (hi - lo)) // take] + offset, 0
        for d in range(BRANCH):
            if tokens[at + d] < 0:
                break
            child = _child(nodes, counts, used, node, tokens[at + d], True)
            if child < 0:
                return
            counts[child, 0] += 1
            if node == 0:
                counts[0, 0] += 1
            node = child


@compiled(nogil=True)
def _fill_store(table, tokens, trie):
    """Build the trie of sampled continuations (Algorithm 2)."""
    _clear(trie)
    length, total = len(tokens), 0
    for j in range(len(table)):
        total += table[j, 3]
    for k in range(min(PREFIX, length), 0, -1):
        for j in range(len(table)):
            lo, hi = find_ngram(table, j, tokens, length - k, k)
            if lo < hi:
                take = min(hi - lo, max(MIN_SAMPLES, (SAMPLES * table[j, 3]) // total))
                text, suffixes = suffixes_of(table, j)
                _insert_samples(trie, text, suffixes, lo, hi, k, take)
        if trie.used[0] - 1 >= ENOUGH:
            break


@compiled(nogil=True)
def _fill_input(request, trie):
    """Build the trie of what followed the newest occurrences of the last token (Algorithm 1)."""
    _clear(trie)
    nodes, counts, used = trie
    tokens, previous, seen = request.tokens, request.previous, 0
    length = len(tokens)
    i = request.heads[find(request, tokens[length - 1])]
    while i >= 0 and seen < OCCURRENCES:
        if i < length - 1:
            seen += 1
            match = 1
            while match < PREFIX and i >= match and tokens[i - match] == tokens[length - 1 - match]:
                match += 1
            node = 0
            for at in range(i + 1, min(i + 1 + GRAM - match, length)):
                if tokens[at] < 0:
                    break
                child = _child(nodes, counts, used, node, tokens[at], False)
                for m in range(match):
                    counts[child, m] += 1
                    if node == 0:
                        counts[0, m] += 1
                node = child
        i = previous[i]


@compiled(nogil=True)
def _push(entries, ends, score, node, match, parent):
    """Add an entry to the heap, highest score on top, then the one that came first."""
    i = ends[SIZE]
    while i > 0:
        up = (i - 1) >> 1
        if entries[up].score >= score:
            break
        entries[i] = entries[up]
        i = up
    entry = entries[i]
    entry.score, entry.node, entry.match, entry.parent, entry.order = score, node, match, parent, ends[PUSHED]
    ends[SIZE] += 1
    ends[PUSHED] += 1


@compiled(nogil=True)
def _comes_first(a, b):
    return a.score > b.score or (a.score == b.score and a.order < b.order)


@compiled(nogil=True)
def _pop(entries, ends):
    """Remove the top."""
    ends[SIZE] -= 1
    size, i, child = ends[SIZE], 0, 1
    while child < size:
        if child + 1 < size and _comes_first(entries[child + 1], entries[child]):
            child += 1
        if _comes_first(entries[size], entries[child]):
            break
        entries[i] = entries[child]
        i, child = child, 2 * child + 1
    entries[i] = entries[size]


@compiled(nogil=True)
def _push_children(trie, node, match, scale, heap, parent):
    """Push the continuations of a node, by their share of its count times both numbers in `scale`; `match` and `parent`
    as in `_ENTRY`."""
    nodes, counts, _ = trie
    entries, ends = heap
    column = max(match - 1, 0)
    total, child = counts[node, column], nodes[node].first
    while child >= 0:
        if counts[child, column] > 0:
            _push(entries, ends, counts[child, column] / total * scale[0] * scale[1], child, match, parent)
        child = nodes[child].next


@compiled(nogil=True)
def draft_tree(request, table, limits, tree, scratch):
    """Merge all sources, best first, into a tree (Algorithm 3); return its number of nodes.

    A node's kind is the match length of the input it comes from, 0 for the store. Arguments are as of
    `learned.draft_tree`; table: of a `Store`; scratch: a `Scratch`.
    """
    tokens, heap = request.tokens, scratch.heap
    if len(tokens) == 0:
        return 0
    add_node(tree, 0, tokens[-1], -1, 1.0, 0)
    n, tip = 1, 0
    heap.ends[SIZE] = heap.ends[PUSHED] = 0
    if len(table) > 0:
        _fill_store(table, tokens, scratch.store)
        _push_children(scratch.store, 0, 0, (1.0, 1.0), heap, 0)
    _fill_input(request, scratch.input)
    for match in range(PREFIX, 0, -1):
        _push_children(scratch.input, 0, match, (1.0, INPUT_DISCOUNT), heap, 0)
    while heap.ends[SIZE] > 0 and n < limits.max_nodes:
        top = heap.entries[0]
        score, node, match, parent = top.score, top.node, top.match, top.parent
        _pop(heap.entries, heap.ends)
        if score <= limits.min_score:
            break
        trie = scratch.store if match == 0 else scratch.input
        token, here = trie.nodes[node].token, parent + 1
        while here < n and not (tree.parents[here] == parent and tree.tokens[here] == token):
            here += 1
        if here == n:
            if limits.chain and parent != tip:
                continue
            add_node(tree, n, token, parent, score, match)
            tip = n
            n += 1
        _push_children(trie, node, match, (score, 0.6 + 0.1 * match if match else 1.0), heap, here)
    return n
