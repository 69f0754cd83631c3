"""The paper's scorer: papers/sssd.txt (Marzollo et al.), Algorithms 1-3, with their constants.

Algorithm 1 looks the last 1..P tokens up in the request, Algorithm 2 the last P (then fewer) in the datastore,
Algorithm 3 merges the continuations by count ratios, discounted by source and match length. Scores are not calibrated.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from sssd_plugin.datastore.index.search import bucket, narrow
from sssd_plugin.pointers import int32_at
from sssd_plugin.request_index import HEADS, LENGTH, PREVIOUS, TABLE_SIZE, TOKENS, find

PREFIX = 4  # P: the longest context looked up
OCCURRENCES = 128  # newest occurrences in the request
GRAM = 8  # longest n-gram kept of the request, prefix included
BRANCH = 10  # longest continuation from the datastore
SAMPLES = 100
SAMPLES_FLOOR = 20  # of one sub-index
ENOUGH = 50  # trie nodes after which the prefix is not shortened further
INPUT_DISCOUNT = 0.6

_ROUNDS = PREFIX
_MAX_STORE = 4096
_MAX_INPUT = OCCURRENCES * GRAM
_HEAP = _MAX_STORE + PREFIX * _MAX_INPUT
_MAX_NODES = 65536
INTS = 4 * _MAX_STORE + (5 + PREFIX) * _MAX_INPUT + 3 * OCCURRENCES + 4 * _HEAP + GRAM + BRANCH + 2
FLOATS = _HEAP


@njit(nogil=True, cache=True)
def _insert_sorted(tokens, suffixes, lo, hi, offset, take, name, count, first, next_, path, used):
    """Insert evenly spaced suffixes of [lo, hi), which are sorted, into the trie; number of its nodes afterwards.

    Both the suffixes and every list of siblings are sorted, so a cursor per level only moves forward.
    """
    size = hi - lo
    for d in range(BRANCH + 1):
        path[d] = -1
    path[0] = 0
    for q in range(take):
        at = suffixes[lo + (q * size) // take] + offset
        same = True  # so far on the previous suffix's path
        node = 0
        for d in range(BRANCH):
            token = tokens[at + d]
            if token < 0:
                for e in range(d + 1, BRANCH + 1):
                    path[e] = -1
                break
            cursor = path[d + 1] if same else -1
            if cursor >= 0 and name[cursor] == token:
                child = cursor
            else:
                same = False
                before = cursor
                child = next_[cursor] if cursor >= 0 else first[node]
                while child >= 0 and name[child] < token:
                    before = child
                    child = next_[child]
                if child < 0 or name[child] != token:
                    if used >= _MAX_STORE:
                        return used
                    new = used
                    used += 1
                    name[new] = token
                    count[new] = 0
                    first[new] = -1
                    next_[new] = child
                    if before >= 0:
                        next_[before] = new
                    else:
                        first[node] = new
                    child = new
                for e in range(d + 2, BRANCH + 1):
                    path[e] = -1
            count[child] += 1
            path[d + 1] = child
            node = child
    return used


@njit(nogil=True, cache=True)
def _store_trie(table, tokens, length, name, count, first, next_, path):
    """Algorithm 2: the trie of sampled continuations; number of its nodes, root included."""
    first[0] = -1
    used = 1
    total = 0
    for j in range(len(table)):
        total += table[j, 3]
    for drop in range(_ROUNDS):
        k = PREFIX - drop
        if k > length:
            continue
        for j in range(len(table)):
            data = int32_at(table[j, 0], table[j, 3] + 32)
            suffixes = int32_at(table[j, 1], table[j, 4])
            a, b = bucket(table, j, tokens[length - k])
            for i in range(1, k):
                if a >= b:
                    break
                a, b = narrow(data, suffixes, a, b, i, tokens[length - k + i])
            if a < b:
                take = min(b - a, max(SAMPLES_FLOOR, (SAMPLES * table[j, 3]) // total))
                used = _insert_sorted(data, suffixes, a, b, k, take, name, count, first, next_, path, used)
        if used - 1 >= ENOUGH:
            break
    return used


@njit(nogil=True, cache=True)
def _push(heap_score, heap_item, size, score, order, node, match, parent):
    """Add (score, node, match, parent) to the heap; highest score on top, then the one that came first."""
    i = size
    while i > 0:
        up = (i - 1) >> 1
        if heap_score[up] >= score:
            break
        heap_score[i] = heap_score[up]
        heap_item[i] = heap_item[up]
        i = up
    heap_score[i] = score
    heap_item[i, 0] = order
    heap_item[i, 1] = node
    heap_item[i, 2] = match
    heap_item[i, 3] = parent
    return size + 1


@njit(nogil=True, cache=True)
def _pop(heap_score, heap_item, size):
    """Drop the top; new size."""
    size -= 1
    score, order = heap_score[size], heap_item[size, 0]
    i = 0
    while True:
        child = 2 * i + 1
        if child >= size:
            break
        if child + 1 < size and (
            heap_score[child + 1] > heap_score[child]
            or (heap_score[child + 1] == heap_score[child] and heap_item[child + 1, 0] < heap_item[child, 0])
        ):
            child += 1
        if heap_score[child] < score or (heap_score[child] == score and heap_item[child, 0] > order):
            break
        heap_score[i] = heap_score[child]
        heap_item[i] = heap_item[child]
        i = child
    heap_score[i] = score
    heap_item[i] = heap_item[size]
    return size


@njit(nogil=True, cache=True)
def _expand_input(
    tokens, length, node, depth_of, name, begin, end, first, children, counts, members, matches, used, filled
):
    """Group the members of `node` by the token that follows; (number of nodes, fill of `members`)."""
    depth = depth_of[node]
    first[node] = used
    number = 0
    for i in range(begin[node], end[node]):
        at = members[i]
        if matches[i] + depth >= GRAM or at + depth + 1 >= length:
            continue
        token = tokens[at + depth + 1]
        child = first[node]
        while child < used and name[child] != token:
            child += 1
        if child == used:
            used += 1
            number += 1
            name[child] = token
            depth_of[child] = depth + 1
            children[child] = -1
            end[child] = 0
            counts[child, :] = 0
        end[child] += 1
        for m in range(matches[i]):
            counts[child, m] += 1
    children[node] = number
    for child in range(first[node], used):
        begin[child] = filled
        filled += end[child]
        end[child] = begin[child]
    for i in range(begin[node], end[node]):
        at = members[i]
        if matches[i] + depth >= GRAM or at + depth + 1 >= length:
            continue
        token = tokens[at + depth + 1]
        child = first[node]
        while name[child] != token:
            child += 1
        members[end[child]] = at
        matches[end[child]] = matches[i]
        end[child] += 1
    return used, filled


@njit(nogil=True, cache=True)
def draft_tree(
    slots, s, table, max_nodes, chain, min_score,
    out_tokens, out_parents, out_depths, out_scores, out_kinds, ints, floats,
):  # fmt: skip
    """Algorithm 3: merge all sources, best first, into a tree of at most `max_nodes` nodes; their number.

    A node's kind is the match length of the input it comes from, 0 for the store.

    Args: as in `sssd_plugin.learned.draft_tree`; ints and floats are scratch of INTS and FLOATS entries.
    """
    length = slots[s, LENGTH]
    if length == 0:
        return 0
    tokens = int32_at(slots[s, TOKENS], length)
    previous = int32_at(slots[s, PREVIOUS], length)
    heads = int32_at(slots[s, HEADS], slots[s, TABLE_SIZE])

    at = 0
    name, at = ints[at : at + _MAX_STORE], at + _MAX_STORE
    count, at = ints[at : at + _MAX_STORE], at + _MAX_STORE
    first, at = ints[at : at + _MAX_STORE], at + _MAX_STORE
    next_, at = ints[at : at + _MAX_STORE], at + _MAX_STORE
    heap_item, at = ints[at : at + 4 * _HEAP].reshape((_HEAP, 4)), at + 4 * _HEAP
    in_name, at = ints[at : at + _MAX_INPUT], at + _MAX_INPUT
    in_depth, at = ints[at : at + _MAX_INPUT], at + _MAX_INPUT
    in_first, at = ints[at : at + _MAX_INPUT], at + _MAX_INPUT
    in_children, at = ints[at : at + _MAX_INPUT], at + _MAX_INPUT
    in_counts, at = ints[at : at + PREFIX * _MAX_INPUT].reshape((_MAX_INPUT, PREFIX)), at + PREFIX * _MAX_INPUT
    path, at = ints[at : at + BRANCH + 1], at + BRANCH + 1
    heap_score = floats[:_HEAP]

    out_tokens[0] = tokens[length - 1]
    out_parents[0] = -1
    out_depths[0] = 0
    out_scores[0] = 1.0
    out_kinds[0] = 0
    n, pushed, size, tip = 1, 0, 0, 0

    if len(table) > 0:
        _store_trie(table, tokens, length, name, count, first, next_, path)
        below = 0
        child = first[0]
        while child >= 0:
            below += count[child]
            child = next_[child]
        count[0] = below
        child = first[0]
        while child >= 0:
            size = _push(heap_score, heap_item, size, count[child] / below, pushed, child, 0, 0)
            pushed += 1
            child = next_[child]

    # Algorithm 1. Tries of all match lengths are nested, so one set of nodes with a count per match length serves all.
    members = np.empty(_MAX_INPUT + OCCURRENCES, np.int32)
    matches = np.empty(_MAX_INPUT + OCCURRENCES, np.int32)
    begin = np.empty(_MAX_INPUT, np.int32)
    end = np.empty(_MAX_INPUT, np.int32)
    filled = 0
    i = heads[find(heads, slots[s, TABLE_SIZE], tokens, tokens[length - 1])]
    while i >= 0 and filled < OCCURRENCES:
        if i < length - 1:
            match = 1
            while match < PREFIX and i >= match and tokens[i - match] == tokens[length - 1 - match]:
                match += 1
            members[filled] = i
            matches[filled] = match
            filled += 1
        i = previous[i]
    used = 1
    in_depth[0] = 0
    begin[0], end[0] = 0, filled
    used, filled = _expand_input(
        tokens, length, 0, in_depth, in_name, begin, end, in_first, in_children, in_counts,
        members, matches, used, filled,
    )  # fmt: skip
    for m in range(PREFIX - 1, -1, -1):
        below = 0
        for child in range(in_first[0], in_first[0] + in_children[0]):
            below += in_counts[child, m]
        in_counts[0, m] = below
        for child in range(in_first[0], in_first[0] + in_children[0]):
            if in_counts[child, m] > 0:
                p = in_counts[child, m] / below * INPUT_DISCOUNT
                size = _push(heap_score, heap_item, size, p, pushed, child, m + 1, 0)
                pushed += 1

    while size > 0 and n < max_nodes:
        score = heap_score[0]
        node, match, parent = heap_item[0, 1], heap_item[0, 2], heap_item[0, 3]
        size = _pop(heap_score, heap_item, size)
        if score <= min_score:
            break
        token = name[node] if match == 0 else in_name[node]
        here = parent + 1
        while here < n and not (out_parents[here] == parent and out_tokens[here] == token):
            here += 1
        if here == n:
            if chain and parent != tip:
                continue
            out_tokens[n] = token
            out_parents[n] = parent
            out_depths[n] = out_depths[parent] + 1
            out_scores[n] = score
            out_kinds[n] = match
            tip = n
            n += 1
        if match == 0:
            child = first[node]
            while child >= 0:
                size = _push(heap_score, heap_item, size, count[child] / count[node] * score, pushed, child, 0, here)
                pushed += 1
                child = next_[child]
        else:
            if in_children[node] < 0:
                used, filled = _expand_input(
                    tokens, length, node, in_depth, in_name, begin, end, in_first, in_children, in_counts,
                    members, matches, used, filled,
                )  # fmt: skip
            discount = 0.6 + 0.1 * match
            for child in range(in_first[node], in_first[node] + in_children[node]):
                if in_counts[child, match - 1] > 0:
                    p = in_counts[child, match - 1] / in_counts[node, match - 1] * score * discount
                    size = _push(heap_score, heap_item, size, p, pushed, child, match, here)
                    pushed += 1
    return n
