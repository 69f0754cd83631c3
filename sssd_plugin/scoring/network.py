"""The network of the learned scorer: its inputs per node and candidate, and its logits."""

from __future__ import annotations

import math

import numpy as np

from freedraft.compiled import compiled
from sssd_plugin.recycled_logits import SCALE
from sssd_plugin.request_index import find
from sssd_plugin.scoring.candidates import INPUT, SHORT_ORDERS, SKIP_STORE, STORE
from sssd_plugin.scoring.matches import DELETED, EVIDENCE, INSERTED, MAX_MATCH, MIN_RUN
from sssd_plugin.scoring.ranges import MANY, STORE_ORDERS
from sssd_plugin.scoring.vectors import add_rows
from sssd_plugin.scoring.weights import INPUTS, NODE_INPUTS, WIDTH

LIKELY = 4.0  # -ln p of a token without evidence by recycled logits

_LOG_COUNT = np.log(np.arange(512) + 0.1)
_LOG_TOTAL = np.log(np.arange(512) + 1.0)
_LOG_MATCH = np.log(np.maximum(np.arange(MAX_MATCH + 1), 6) / 6)

# First input, first column and number of the inputs ln(count + 0.1) - ln(total + 1), 0 without observations.
_COUNT_INPUTS = (
    (3, STORE + 1, STORE_ORDERS - 1),
    (6, INPUT, 4),
    (10, SKIP_STORE, 5),
    (15, STORE + MANY, 1),
    (16, INPUT + SHORT_ORDERS + 3, 3),
)


@compiled(nogil=True)
def variety(column):
    """Return a class of the diversity of a context's followers.

    0: none were seen; 1: a single one; 2, 3: two or three alike, more alike; 4: all differ; 5: each three times or more
    on average; 6: anything between.
    """
    total, kinds = column.total, column.kinds
    if total == 0:
        return 0
    if kinds <= 1:
        return 1 if total == 1 else 2 if total < 4 else 3
    if kinds == total:
        return 4
    return 5 if total >= 3 * kinds else 6


@compiled(nogil=True, inline="always")
def write_node_inputs(scratch, node, store_order, input_order, order):
    """Write the inputs common to a node's candidates: whether it is below the root; one-hot longest contexts in store
    and request, and their `variety`; ln of the many-token context; context of recycled logits."""
    x, columns = scratch.node_inputs[0], scratch.found.columns
    x[:] = 0.0
    x[0] = 1.0 if node > 0 else 0.0
    if store_order > 0:
        x[store_order] = 1.0
        x[14 + variety(columns[STORE + store_order - 1])] = 1.0
    if input_order > 0:
        x[5 + input_order] = 1.0
        x[20 + variety(columns[INPUT + input_order - 1])] = 1.0
    x[27] = math.log(max(scratch.many[node], STORE_ORDERS) / STORE_ORDERS)
    if order > 0:
        x[27 + order] = 1.0


@compiled(nogil=True, inline="always")
def write_inputs(request, scratch, node, m):
    """Write the inputs of the m candidates of a node's shortlist."""
    _, _, candidates, counts, columns = scratch.found
    about, shortlist, inputs, seen, n_seen = scratch.about[0], scratch.shortlist, scratch.inputs, scratch.seen, 0
    many = math.log(max(scratch.many[node], STORE_ORDERS) / STORE_ORDERS)
    run = math.log(max(about.run, MIN_RUN) / MIN_RUN)
    evidence = about.evidence / EVIDENCE
    for first, column, number in _COUNT_INPUTS:
        for k in range(number):
            if columns[column + k].total > 0:
                seen[n_seen, 0], seen[n_seen, 1] = first + k, column + k
                n_seen += 1
    for i in range(m):
        c = shortlist[i]
        candidate, x = candidates[c], inputs[i]
        x[:] = 0.0
        occurrences = np.int64(request.counts[find(request, candidate.token)])
        x[0] = math.log(max(candidate.store, 1e-7))
        x[1] = math.log(max(candidate.input, 1e-6))
        log_occurrences = _LOG_COUNT[occurrences] if occurrences < 512 else math.log(occurrences + 0.1)
        x[2] = log_occurrences - math.log(len(request.tokens) * candidate.share + 0.5)
        for s in range(n_seen):
            f, column = seen[s]
            x[f] = _LOG_COUNT[counts[c, column]] - _LOG_TOTAL[columns[column].total]
        if counts[c, STORE + MANY] > 0:
            x[19] = many
        if candidate.match > 0:
            x[20] = _LOG_MATCH[candidate.match]
            x[21] = 1.0 if c == about.longest else 0.0
            x[22] = 1.0 if c == about.newest else 0.0
        if candidate.since >= 0:
            x[23] = 1.0
            x[24] = math.log(1.0 + candidate.since)
            x[25] = run
            x[26] = 1.0 if candidate.kind == INSERTED else -1.0 if candidate.kind == DELETED else 0.0
            x[27] = evidence
        if candidate.token == about.follower:
            x[28] = 1.0
            x[29] = about.learnt
        if candidate.cost >= 0:
            x[30] = 1.0
            x[31] = LIKELY - candidate.cost * (1 / SCALE)


@compiled(nogil=True, inline="always")
def evaluate(scratch, m, weights):
    """Write the network's logits of m candidates, in float32: rows of inputs are added in order, common inputs first;
    then the units in halves."""
    layer, out = weights
    inputs, largest, common, hidden = scratch.inputs, scratch.largest, scratch.common, scratch.hidden
    largest[0] = inputs[0]
    for i in range(1, m):
        for k in range(INPUTS):
            largest[0, k] = max(largest[0, k], inputs[i, k])
    add_rows(layer[0], layer, 1, scratch.node_inputs, 0, common)
    add_rows(common, layer, 1 + NODE_INPUTS, largest, 0, common)
    for i in range(m):
        add_rows(common, layer, 1 + NODE_INPUTS + INPUTS, inputs, i, hidden)
        for k in range(WIDTH):  # the last unit is linear
            hidden[k] = (hidden[k] if k == WIDTH - 1 else max(hidden[k], np.float32(0.0))) * out[k]
        half = WIDTH // 2
        while half > 0:
            for k in range(half):
                hidden[k] += hidden[k + half]
            half //= 2
        scratch.probabilities[i] = hidden[0]
