"""Recycled logits: the target's likeliest next tokens at every verified node, by the tokens before it.

Verification computes a whole distribution at each node of a draft tree, and plain speculation uses one token of it.
Here the likeliest eight are kept, also of rejected nodes (Token Recycling, arXiv 2408.08696). They are looked up by the
last 1 to 4 tokens, so logits of one request serve all requests of its tenant.

The table has a fixed number of entries in sets of `WAYS`; a new entry replaces the oldest of its set.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freedraft.compiled import compiled, lean
from freedraft.step import TOP_TOKENS
from sssd_plugin.request_index import mix, request_at
from sssd_plugin.scoring.views import write_context

TOP = TOP_TOKENS  # tokens kept per distribution
ORDERS = 4  # contexts of 1 to 4 tokens are looked up
WAYS = 4
SCALE = 1024.0  # a cost is -ln p in units of 1 / SCALE
MAX_COST = 32767

# Hash of tenant and context, 0 for an empty entry; tenant; the likeliest tokens and their costs, likeliest first;
# number of the writing call.
ENTRY = np.dtype([("key", "u8"), ("tenant", "i8"), ("tokens", "i4", (TOP,)), ("costs", "i2", (TOP,)), ("stamp", "i8")])


class Recycled(NamedTuple):
    """The recycled logits that one request drafts from."""

    entries: NDArray[Any]  # [n], records of `ENTRY`: a power of two of them, or none
    tenant: np.int64  # of the entries to use


def entries(megabytes: float) -> NDArray[Any]:
    """Allocate an empty table of at most `megabytes` (2^20 bytes each)."""
    number = int(megabytes * 2**20) // ENTRY.itemsize
    return np.zeros(0 if number < WAYS else 1 << (number.bit_length() - 1), ENTRY)


@lean
def _keys(tenant, context, filled, keys):
    """Write the keys of the last 1 to ORDERS tokens of a context, newest first; return their number."""
    number = min(filled, ORDERS)
    key = mix(np.uint64(tenant) + np.uint64(0x9E3779B97F4A7C15))
    for k in range(number):
        key = mix(key + np.uint64(context[k]) + np.uint64(0x9E3779B97F4A7C15))
        keys[k] = key | np.uint64(1)
    return number


@lean
def find(recycled, context, filled, keys):
    """Return the largest number of last tokens with an entry, and this entry; 0 tokens for none. context: int32 [C],
    newest token first, `filled` of them; keys: uint64 [ORDERS], scratch space."""
    table = recycled.entries
    if len(table) > 0:
        sets = np.uint64(len(table) // WAYS - 1)
        for k in range(_keys(recycled.tenant, context, filled, keys) - 1, -1, -1):
            first = np.int64((keys[k] >> np.uint64(8)) & sets) * WAYS
            for i in range(first, first + WAYS):
                if table[i].key == keys[k] and table[i].tenant == recycled.tenant:
                    return k + 1, i
    return 0, np.int64(0)


@lean
def put(recycled, context, filled, keys, likeliest, vocab_size, stamp):
    """Keep the likeliest tokens after a context, for each order. likeliest: int32 [TOP], and float32 [TOP], their
    log-probabilities.

    Ids outside the vocabulary get MAX_COST, that is none; if all are, nothing is kept.
    """
    tokens, log_probs = likeliest
    if not (0 <= tokens[0] < vocab_size and log_probs[0] > -MAX_COST / SCALE):
        return
    table = recycled.entries
    sets = np.uint64(len(table) // WAYS - 1)
    for k in range(_keys(recycled.tenant, context, filled, keys)):
        first = np.int64((keys[k] >> np.uint64(8)) & sets) * WAYS
        target = first
        for i in range(first, first + WAYS):
            if table[i].key == keys[k] and table[i].tenant == recycled.tenant:
                target = np.int64(i)
                break
            if table[i].stamp < table[target].stamp:
                target = np.int64(i)
        entry = table[target]
        entry.key, entry.tenant, entry.stamp = keys[k], recycled.tenant, stamp
        for t in range(TOP):
            entry.tokens[t] = tokens[t]
            cost = MAX_COST
            if 0 <= tokens[t] < vocab_size and log_probs[t] > -MAX_COST / SCALE:
                cost = int(max(-log_probs[t], 0.0) * SCALE + 0.5)
            entry.costs[t] = min(cost, MAX_COST)


@compiled(nogil=True)
def put_trees(slots, requests, entries, trees, likeliest, vocab_size, clock):
    """Keep the likeliest tokens at every node of trees, for requests that still have their tree's root.

    Args:
        slots: `RequestIndex.slots`; requests: int64 [B] each, slots (-1 is skipped), tenants, and tokens
            of each up to its root, -1 for all.
        trees: tokens and parents, int32 [B, N], and number of nodes [B]; likeliest: as of `put`, [B, N, TOP].
        clock: int64 [1], calls so far.
    """
    slot_ids, tenants, contexts = requests
    tokens, parents, counts = trees
    top_tokens, top_log_probs = likeliest
    context, keys = np.empty(ORDERS, np.int32), np.empty(ORDERS, np.uint64)
    clock[0] += 1
    for b in range(len(slot_ids)):
        if slot_ids[b] < 0:
            continue
        known = request_at(slots, slot_ids[b]).tokens
        n = len(known) if contexts[b] < 0 else contexts[b]
        if 0 < n <= len(known) and known[n - 1] == tokens[b, 0]:
            recycled = Recycled(entries, tenants[b])
            for node in range(counts[b]):
                filled = write_context(known[:n], tokens[b], parents[b], node, context)
                best = top_tokens[b, node], top_log_probs[b, node]
                put(recycled, context, filled, keys, best, vocab_size, clock[0])
