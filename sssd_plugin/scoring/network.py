"""The network of the learned scorer: its inputs per node and candidate, and its logits."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from freedraft.compiled import compiled
from sssd_plugin.recycled_logits import SCALE
from sssd_plugin.request_index import find
from sssd_plugin.scoring.inputs import CANDIDATE, COLUMN, INPUTS, NODE, ROW, STORE_ORDERS, CandidateInputs, Columns
from sssd_plugin.scoring.matches import DELETED, EVIDENCE, INSERTED, MAX_MATCH, MIN_RUN
from sssd_plugin.scoring.ranges import MANY
from sssd_plugin.scoring.weights import WIDTH

LIKELY = 4.0  # -ln p of a token without evidence by recycled logits

_LOG_COUNT = np.log(np.arange(512) + 0.1)
_LOG_TOTAL = np.log(np.arange(512) + 1.0)
_LOG_MATCH = np.log(np.maximum(np.arange(MAX_MATCH + 1), 6) / 6)

_VECTOR = ir.VectorType(ir.FloatType(), WIDTH)

_NUMBER, _COLUMNS = CandidateInputs(), Columns()
# First input, first column and number of the inputs that are counts.
_COUNT_INPUTS = (
    (CANDIDATE.store_counts, COLUMN.store + 1, _NUMBER.store_counts),
    (CANDIDATE.request_counts, COLUMN.request, _NUMBER.request_counts),
    (CANDIDATE.skip_store_counts, COLUMN.skip_store, _NUMBER.skip_store_counts),
    (CANDIDATE.skip_request_counts, COLUMN.skip_request, _NUMBER.skip_request_counts),
    (CANDIDATE.many_counts, COLUMN.store + MANY, _NUMBER.many_counts),
    (CANDIDATE.long_counts, COLUMN.request + _COLUMNS.request - _NUMBER.long_counts, _NUMBER.long_counts),
)


@compiled(nogil=True)
def variety(column):
    """Return a class of the diversity of a context's followers.

    0: none were seen; 1: a single one; 2, 3: two or three alike, more alike; 4: all differ; 5: each three times or more
    on average; 6: anything between.
    """
    total, distinct = column.total, column.distinct
    if total == 0:
        return 0
    if distinct <= 1:
        return 1 if total == 1 else 2 if total < 4 else 3
    if distinct == total:
        return 4
    return 5 if total >= 3 * distinct else 6


@compiled(nogil=True, inline="always")
def write_node_inputs(scratch, node, store_order, request_order, recycled_order):
    """Write the inputs common to a node's candidates: `inputs.NodeInputs`."""
    x, columns = scratch.node_inputs[0], scratch.found.columns
    x[:] = 0.0
    x[NODE.below_root] = 1.0 if node > 0 else 0.0
    if store_order > 0:
        x[NODE.store_order + store_order - 1] = 1.0
        x[NODE.store_variety + variety(columns[COLUMN.store + store_order - 1]) - 1] = 1.0
    if request_order > 0:
        x[NODE.request_order + request_order - 1] = 1.0
        x[NODE.request_variety + variety(columns[COLUMN.request + request_order - 1]) - 1] = 1.0
    x[NODE.many] = math.log(max(scratch.many[node], STORE_ORDERS) / STORE_ORDERS)
    if recycled_order > 0:
        x[NODE.recycled_order + recycled_order - 1] = 1.0


@compiled(nogil=True, inline="always")
def write_inputs(request, scratch, node, m):
    """Write the inputs of the m candidates of a node's shortlist: `inputs.CandidateInputs`."""
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
        x[CANDIDATE.store] = math.log(max(candidate.store, 1e-7))
        x[CANDIDATE.request] = math.log(max(candidate.request, 1e-6))
        log_occurrences = _LOG_COUNT[occurrences] if occurrences < 512 else math.log(occurrences + 0.1)
        x[CANDIDATE.surplus] = log_occurrences - math.log(len(request.tokens) * candidate.share + 0.5)
        for s in range(n_seen):
            f, column = seen[s]
            x[f] = _LOG_COUNT[counts[c, column]] - _LOG_TOTAL[columns[column].total]
        if counts[c, COLUMN.store + MANY] > 0:
            x[CANDIDATE.many] = many
        if candidate.match > 0:
            x[CANDIDATE.match] = _LOG_MATCH[candidate.match]
            x[CANDIDATE.longest] = 1.0 if c == about.longest else 0.0
            x[CANDIDATE.newest] = 1.0 if c == about.newest else 0.0
        if candidate.since >= 0:
            x[CANDIDATE.aligned] = 1.0
            x[CANDIDATE.since] = math.log(1.0 + candidate.since)
            x[CANDIDATE.run] = run
            x[CANDIDATE.edit] = 1.0 if candidate.edit == INSERTED else -1.0 if candidate.edit == DELETED else 0.0
            x[CANDIDATE.evidence] = evidence
        if candidate.token == about.follower:
            x[CANDIDATE.follower] = 1.0
            x[CANDIDATE.learnt] = about.learnt
        if candidate.cost >= 0:
            x[CANDIDATE.recycled] = 1.0
            x[CANDIDATE.recycled_log_prob] = LIKELY - candidate.cost * (1 / SCALE)


# Vectors: short loops over arrays that may overlap are not vectorised.


def _row(context, builder, array, row):
    """The address of a row of `WIDTH` numbers."""
    place = builder.gep(array.data, [builder.mul(row, context.get_constant(types.intp, WIDTH))])
    return builder.bitcast(place, _VECTOR.as_pointer())


@intrinsic
def add_rows(typingctx, start, layer, first, values, row, target):
    """Write target = start + values[row, 0] * layer[first] + values[row, 1] * layer[first + 1] + ..., in this order.

    start, target: float32 [WIDTH]; layer: float32 [R, WIDTH]; values: float32 [N, F]; all contiguous.
    """

    def codegen(context, builder, signature, args):
        at = partial(_row, context, builder)
        arrays = (context.make_array(signature.args[i])(context, builder, args[i]) for i in (0, 1, 3, 5))
        begin, rows, numbers, end = arrays
        zero = context.get_constant(types.intp, 0)
        columns = cgutils.unpack_tuple(builder, numbers.shape)[1]
        own = builder.gep(numbers.data, [builder.mul(args[4], columns)])
        total = cgutils.alloca_once(builder, _VECTOR)
        builder.store(builder.load(at(begin, zero), align=4), total)
        with cgutils.for_range(builder, columns) as loop:
            value = builder.load(builder.gep(own, [loop.index]))
            splat = builder.insert_element(ir.Constant(_VECTOR, ir.Undefined), value, ir.Constant(ir.IntType(32), 0))
            mask = ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), [0] * WIDTH)
            splat = builder.shuffle_vector(splat, splat, mask)
            weights = builder.load(at(rows, builder.add(args[2], loop.index)), align=4)
            builder.store(builder.fadd(builder.load(total), builder.fmul(splat, weights)), total)
        builder.store(builder.load(total), at(end, zero), align=4)
        return context.get_dummy_value()

    return types.void(start, layer, types.intp, values, types.intp, target), codegen


@compiled(nogil=True, inline="always")
def evaluate(scratch, m, layer, out):
    """Write the network's logits of m candidates, in float32: rows of inputs are added in order, common inputs first;
    then the units in halves."""
    inputs, largest, common, hidden = scratch.inputs, scratch.largest, scratch.common, scratch.hidden
    largest[0] = inputs[0]
    for i in range(1, m):
        for k in range(INPUTS):
            largest[0, k] = max(largest[0, k], inputs[i, k])
    add_rows(layer[ROW.bias], layer, ROW.node, scratch.node_inputs, 0, common)
    add_rows(common, layer, ROW.largest, largest, 0, common)
    for i in range(m):
        add_rows(common, layer, ROW.candidate, inputs, i, hidden)
        for k in range(WIDTH):  # the last unit is linear
            hidden[k] = (hidden[k] if k == WIDTH - 1 else max(hidden[k], np.float32(0.0))) * out[k]
        half = WIDTH // 2
        while half > 0:
            for k in range(half):
                hidden[k] += hidden[k + half]
            half //= 2
        scratch.probabilities[i] = hidden[0]
