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

_TRIE = record("", "token count first next")
_GROUP = record("", "token depth begin end first children")
_MEMBER = record("", "position match child")
_ENTRY = record("score", "order node match parent")


class Scratch(NamedTuple):
    """Preallocated arrays of the paper's scorer."""

    # [_MAX_STORE], the trie of continuations from the store: token, count, first child, next sibling.
    trie: NDArray[Any]
    # int32 [BRANCH + 1], the node last visited at each depth of the trie.
    path: NDArray[np.int32]
    # [_MAX_INPUT], the request's tries of all match lengths, which are nested: token, depth, members that lead to the
    # node, first child, number of children (-1: not expanded).
    groups: NDArray[Any]
    # int32 [_MAX_INPUT, PREFIX], members that lead to the node with a match of at least m + 1 tokens.
    counts: NDArray[np.int32]
    # Occurrences of the last token: position, length of the match before it, node that it goes on to.
    members: NDArray[Any]
    # Candidates by score, then by order of arrival; match 0 is a node of `trie`, else one of `groups`.
    heap: NDArray[Any]


def scratch() -> Scratch:
    """Allocate scratch space."""
    return Scratch(
        np.zeros(_MAX_STORE, _TRIE),
        np.zeros(BRANCH + 1, np.int32),
        np.zeros(_MAX_INPUT, _GROUP),
        np.zeros((_MAX_INPUT, PREFIX), np.int32),
        np.zeros(_MAX_INPUT + OCCURRENCES, _MEMBER),
        np.zeros(_MAX_STORE + PREFIX * _MAX_INPUT, _ENTRY),
    )


@compiled(nogil=True)
def _insert_sorted(tokens, suffixes, lo, hi, offset, take, trie, path, used):
    """Insert evenly spaced suffixes of [lo, hi) into the trie; return its number of nodes. They and all lists of
    siblings are sorted, so a cursor per level only moves forward."""
    size = hi - lo
    path[0] = 0
    path[1:] = -1
    for q in range(take):
        at = suffixes[lo + (q * size) // take] + offset
        same = True  # so far on the previous suffix's path
        node = 0
        for d in range(BRANCH):
            token = tokens[at + d]
            if token < 0:
                path[d + 1 :] = -1
                break
            cursor = path[d + 1] if same else -1
            if cursor >= 0 and trie[cursor].token == token:
                child = cursor
            else:
                same = False
                before = cursor
                child = trie[cursor].next if cursor >= 0 else trie[node].first
                while child >= 0 and trie[child].token < token:
                    before = child
                    child = trie[child].next
                if child < 0 or trie[child].token != token:
                    if used >= _MAX_STORE:
                        return used
                    new = trie[used]
                    new.token, new.count, new.first, new.next = token, 0, -1, child
                    child = used
                    used += 1
                    if before >= 0:
                        trie[before].next = child
                    else:
                        trie[node].first = child
                path[d + 2 :] = -1
            trie[child].count += 1
            path[d + 1] = child
            node = child
    return used


@compiled(nogil=True)
def _store_trie(table, tokens, trie, path):
    """Build the trie of sampled continuations (Algorithm 2)."""
    trie[0].first = -1
    length, used, total = len(tokens), 1, 0
    for j in range(len(table)):
        total += table[j, 3]
    for k in range(min(PREFIX, length), 0, -1):
        for j in range(len(table)):
            lo, hi = find_ngram(table, j, tokens, length - k, k)
            if lo < hi:
                take = min(hi - lo, max(MIN_SAMPLES, (SAMPLES * table[j, 3]) // total))
                text, suffixes = suffixes_of(table, j)
                used = _insert_sorted(text, suffixes, lo, hi, k, take, trie, path, used)
        if used - 1 >= ENOUGH:
            break


@compiled(nogil=True)
def _push(heap, size, order, score, node, match, parent):
    """Add an entry to the heap, highest score on top, then lowest order; return the next size and order."""
    i = size
    while i > 0:
        up = (i - 1) >> 1
        if heap[up].score >= score:
            break
        heap[i] = heap[up]
        i = up
    entry = heap[i]
    entry.score, entry.order, entry.node, entry.match, entry.parent = score, order, node, match, parent
    return size + 1, order + 1


@compiled(nogil=True)
def _pop(heap, size):
    score, order = heap[size].score, heap[size].order
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and (
            heap[child + 1].score > heap[child].score
            or (heap[child + 1].score == heap[child].score and heap[child + 1].order < heap[child].order)
        ):
            child += 1
        if heap[child].score < score or (heap[child].score == score and heap[child].order > order):
            break
        heap[i] = heap[child]
        i = child
    heap[i] = heap[size]


@compiled(nogil=True)
def _occurrences(request, members):
    """Write the newest occurrences of the last token and how far they match (Algorithm 1); return their number."""
    tokens = request.tokens
    length, filled = len(tokens), 0
    i = request.heads[find(request, tokens[length - 1])]
    while i >= 0 and filled < OCCURRENCES:
        if i < length - 1:
            match = 1
            while match < PREFIX and i >= match and tokens[i - match] == tokens[length - 1 - match]:
                match += 1
            members[filled].position = i
            members[filled].match = match
            filled += 1
        i = request.previous[i]
    return filled


@compiled(nogil=True)
def _expand(tokens, node, groups, counts, members, used, filled):
    """Group the members of `node` by the token that follows; return the numbers of groups and members in use."""
    parent = groups[node]
    depth, first = parent.depth, used
    parent.first = first
    for i in range(parent.begin, parent.end):
        member = members[i]
        at, child = member.position + depth + 1, first
        member.child = -1
        if member.match + depth >= GRAM or at >= len(tokens) or tokens[at] < 0:
            continue
        while child < used and groups[child].token != tokens[at]:
            child += 1
        if child == used:
            used += 1
            group = groups[child]
            group.token, group.depth, group.children, group.end = tokens[at], depth + 1, -1, 0
            counts[child, :] = 0
        member.child = child
        groups[child].end += 1
        counts[child, : member.match] += 1
    parent.children = used - first
    for child in range(first, used):
        groups[child].begin = filled
        filled += groups[child].end
        groups[child].end = groups[child].begin
    for i in range(parent.begin, parent.end):
        if members[i].child >= 0:
            group = groups[members[i].child]
            members[group.end] = members[i]
            group.end += 1
    return used, filled


@compiled(nogil=True)
def draft_tree(request, table, max_nodes, chain, min_score, tree, scratch):
    """Merge all sources, best first, into a tree of at most `max_nodes` nodes (Algorithm 3); return their number.

    A node's kind is the match length of the input it comes from, 0 for the store.

    Args: as in `sssd_plugin.scoring.learned.draft_tree`; scratch: a `Scratch`.
    """
    tokens = request.tokens
    if len(tokens) == 0:
        return 0
    trie, groups, counts, heap = scratch.trie, scratch.groups, scratch.counts, scratch.heap
    add_node(tree, 0, tokens[-1], -1, 1.0, 0)
    n, pushed, size, tip = 1, 0, 0, 0

    if len(table) > 0:
        _store_trie(table, tokens, trie, scratch.path)
        total = 0
        child = trie[0].first
        while child >= 0:
            total += trie[child].count
            child = trie[child].next
        child = trie[0].first
        while child >= 0:
            size, pushed = _push(heap, size, pushed, trie[child].count / total, child, 0, 0)
            child = trie[child].next

    root = groups[0]
    root.depth, root.begin, root.end = 0, 0, _occurrences(request, scratch.members)
    used, filled = _expand(tokens, 0, groups, counts, scratch.members, 1, root.end)
    for m in range(PREFIX - 1, -1, -1):
        total = 0
        for child in range(root.first, root.first + root.children):
            total += counts[child, m]
        for child in range(root.first, root.first + root.children):
            if counts[child, m] > 0:
                score = counts[child, m] / total * INPUT_DISCOUNT
                size, pushed = _push(heap, size, pushed, score, child, m + 1, 0)

    while size > 0 and n < max_nodes:
        score, node, match, parent = heap[0].score, heap[0].node, heap[0].match, heap[0].parent
        size -= 1
        _pop(heap, size)
        if score <= min_score:
            break
        token = trie[node].token if match == 0 else groups[node].token
        here = parent + 1
        while here < n and not (tree.parents[here] == parent and tree.tokens[here] == token):
            here += 1
        if here == n:
            if chain and parent != tip:
                continue
            add_node(tree, n, token, parent, score, match)
            tip = n
            n += 1
        if match == 0:
            child = trie[node].first
            while child >= 0:
                p = trie[child].count / trie[node].count * score
                size, pushed = _push(heap, size, pushed, p, child, 0, here)
                child = trie[child].next
        else:
            if groups[node].children < 0:
                used, filled = _expand(tokens, node, groups, counts, scratch.members, used, filled)
            discount = 0.6 + 0.1 * match
            for child in range(groups[node].first, groups[node].first + groups[node].children):
                if counts[child, match - 1] > 0:
                    p = counts[child, match - 1] / counts[node, match - 1] * score * discount
                    size, pushed = _push(heap, size, pushed, p, child, match, here)
    return n
