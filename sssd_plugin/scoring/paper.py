"""The paper's scorer: arXiv 2411.05894, Algorithms 1-3, with their constants.

Algorithm 1 looks up the last 1..P tokens in the request, Algorithm 2 the last P (then fewer) in the datastore.
Algorithm 3 merges the continuations by count ratios, discounted by source and match length. Scores are not calibrated.
"""

from __future__ import annotations

import heapq

import numpy as np

from freedraft.compiled import compiled
from freedraft.cost.acceptance import KINDS
from sssd_plugin.datastore.index.search import find_ngram, suffixes_of
from sssd_plugin.request_index import find
from sssd_plugin.scoring.views import add_node, record
from sssd_plugin.sources import DATASTORE, REQUEST

PREFIX = 4  # P: maximum context that is looked up
OCCURRENCES = 128  # newest occurrences in the request
GRAM = 8  # maximum n-gram from the request, prefix included
BRANCH = 10  # maximum continuation from the datastore
SAMPLES = 100
MIN_SAMPLES = 20  # per sub-index
ENOUGH = 50  # nodes of the datastore's trie, root included, at which the prefix is no longer shortened
INPUT_DISCOUNT = 0.6
# Factor per level below the first, by source: 0.6 + 0.1 * match; the datastore counts as a match of 4 tokens.
DISCOUNTS = (1.0, 0.7, 0.8, 0.9, 1.0)

_MAX_NODES = 1 + PREFIX + PREFIX * OCCURRENCES * (GRAM - 1) + 4096
_NODE = record(
    token="i4",
    count="i4",  # continuations through the node
    first="i4",  # child, -1 for none, as in the next ones
    last="i4",  # visited child
    next="i4",  # sibling
)


@compiled(nogil=True)
def scratch():
    """Return tries of continuations by source, in one array: node 0 is the root for the datastore, node m the root for
    matches of m tokens in the request. Siblings are sorted by token. And int64 [1], number of nodes."""
    return np.empty(_MAX_NODES, _NODE), np.empty(1, np.int64)


@compiled(nogil=True)
def _child(nodes, used, node, token):
    """Return the child of a node for `token`, created if there is none; -1 if the array is full."""
    before, child, last = -1, nodes[node].first, nodes[node].last
    if last >= 0 and nodes[last].token <= token:  # datastore samples are sorted
        child = last
    while child >= 0 and nodes[child].token < token:
        before, child = child, nodes[child].next
    if child < 0 or nodes[child].token != token:
        new = used[0]
        if new >= len(nodes):
            return -1
        used[0] = new + 1
        made = nodes[new]
        made.token, made.count, made.first, made.last, made.next = token, 0, -1, -1, child
        if before >= 0:
            nodes[before].next = new
        else:
            nodes[node].first = new
        child = new
    nodes[node].last = child
    return child


@compiled(nogil=True)
def _insert(nodes, used, source, tokens, start, end):
    """Insert tokens[start:end], up to the first negative one, into the trie of a source."""
    node = source
    nodes[node].count += 1
    for i in range(start, end):
        if tokens[i] < 0:
            break
        node = _child(nodes, used, node, tokens[i])
        if node < 0:
            break
        nodes[node].count += 1


@compiled(nogil=True)
def _add_request(nodes, used, request):
    """Insert what followed the last 1..P tokens before, at the newest occurrences of the last token (Algorithm 1)."""
    tokens, length = request.tokens, len(request.tokens)
    i, seen = request.heads[find(request, tokens[length - 1])], 0
    if i == length - 1:
        i = request.previous[i]
    while i >= 0 and seen < OCCURRENCES:
        seen += 1
        match = 0
        while match < PREFIX and i >= match and tokens[i - match] == tokens[length - 1 - match]:
            match += 1
            _insert(nodes, used, match, tokens, i + 1, min(i + 1 + GRAM - match, length))
        i = request.previous[i]


@compiled(nogil=True)
def _add_store(nodes, used, store, tokens):
    """Insert sampled continuations from the datastore (Algorithm 2)."""
    table, length, before = store.table, len(tokens), used[0] - 1
    for k in range(min(PREFIX, length), 0, -1):
        for j in range(len(table)):
            lo, hi = find_ngram(table, j, tokens, length - k, k)
            take = min(hi - lo, max(MIN_SAMPLES, SAMPLES * table[j, 3] // max(store.size, 1)))
            text, suffixes = suffixes_of(table, j)
            for q in range(take):
                at = suffixes[lo + (q * (hi - lo)) // take] + k
                _insert(nodes, used, 0, text, at, at + BRANCH)
        if used[0] - before >= ENOUGH:
            break


@compiled(nogil=True)
def _push_children(nodes, node, source, scale, parent, heap):
    """Push the children of a trie node as candidates below node `parent` of the tree; a score is `scale` times the
    child's share of the node's count."""
    total, child = nodes[node].count, np.int64(nodes[node].first)
    while child >= 0:
        heapq.heappush(heap, (-(nodes[child].count / total * scale), np.int64(parent), child, np.int64(source)))
        child = np.int64(nodes[child].next)


@compiled(nogil=True)
def draft_tree(request, store, limits, tree, tries):
    """Merge all sources, best first, into a tree (Algorithm 3); return its number of nodes.

    A node's kind is its match length in the request, 0 for the datastore, and its source; learnt text counts as
    datastore. Arguments as in `learned.draft_tree`; tries: from `scratch`.
    """
    nodes, used = tries
    tokens, n, (max_nodes, chain) = request.tokens, 1, limits
    if len(tokens) == 0:
        return 0
    add_node(tree, 0, tokens[-1], -1, 1.0, 0)
    for source in range(1 + PREFIX):
        root = nodes[source]
        root.count, root.first, root.last = 0, -1, -1
    used[0] = 1 + PREFIX
    _add_request(nodes, used, request)
    _add_store(nodes, used, store, tokens)
    # (negative score, parent in the tree, node, source); equal scores are ordered by parent, oldest first.
    heap = [(0.0, 0, 0, 0)]
    heap.pop()
    for source in range(1 + PREFIX):
        _push_children(nodes, source, source, INPUT_DISCOUNT if source else 1.0, 0, heap)
    while len(heap) > 0 and n < max_nodes:
        negative, parent, node, source = heapq.heappop(heap)
        token, here = nodes[node].token, parent + 1
        while here < n and not (tree.parents[here] == parent and tree.tokens[here] == token):
            here += 1
        if here == n:
            if chain and parent != n - 1:
                continue
            add_node(tree, n, token, parent, -negative, source + KINDS * (REQUEST if source else DATASTORE))
            n += 1
        _push_children(nodes, node, source, -negative * DISCOUNTS[source], here, heap)
    return n
