"""The network of the learned scorer: its inputs per node and candidate, and its logits."""

from __future__ import annotations

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from freedraft.compiled import lean
from sssd_plugin.recycled_logits import SCALE
from sssd_plugin.request_index import find
from sssd_plugin.scoring.candidates import BY_REQUEST, BY_STORE, SHARE
from sssd_plugin.scoring.inputs import CANDIDATE, COLUMN, COLUMNS, INPUTS, NODE, ROW, STORE_ORDERS, CandidateInputs
from sssd_plugin.scoring.matches import DELETED, EVIDENCE, INSERTED, MAX_MATCH, MIN_RUN
from sssd_plugin.scoring.ranges import MANY
from sssd_plugin.scoring.weights import WIDTH

LIKELY = 4.0  # -ln p of a token without evidence by recycled logits

_LOG_COUNT = np.log(np.arange(512) + 0.1)
_LOG_TOTAL = np.log(np.arange(512) + 1.0)
_LOG_MATCH = np.log(np.maximum(np.arange(MAX_MATCH + 1), 6) / 6)

BLOCK = 4  # candidates that are evaluated side by side
_INT, _VECTOR = ir.IntType(32), ir.VectorType(ir.FloatType(), WIDTH)
_NONE = ir.Constant(_VECTOR, ir.Undefined)

_NUMBER = CandidateInputs()
# Columns of the inputs that are counts, from `CANDIDATE.store_counts` on.
_COUNT_COLUMNS = np.array([
    *range(COLUMN.store + 1, COLUMN.store + 1 + _NUMBER.store_counts),
    *range(COLUMN.request, COLUMN.request + _NUMBER.request_counts),
    *range(COLUMN.skip_store, COLUMNS),  # of both sources
    COLUMN.store + MANY,
    *range(COLUMN.skip_store - _NUMBER.long_counts, COLUMN.skip_store),
])  # fmt: skip


@lean
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


@lean(inline="always")
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


@lean(inline="always")
def write_inputs(request, scratch, node, m):
    """Write the inputs of the m candidates of a node's shortlist: `inputs.CandidateInputs`."""
    _, _, candidates, counts, probable, columns = scratch.found
    about, shortlist, inputs, seen, n_seen = scratch.about[0], scratch.shortlist, scratch.inputs, scratch.seen, 0
    many = math.log(max(scratch.many[node], STORE_ORDERS) / STORE_ORDERS)
    run = math.log(max(about.run, MIN_RUN) / MIN_RUN)
    evidence = about.evidence / EVIDENCE
    for k in range(len(_COUNT_COLUMNS)):
        if columns[_COUNT_COLUMNS[k]].total > 0:
            seen[n_seen], n_seen = k, n_seen + 1
    for i in range(m):
        c = shortlist[i]
        candidate, x = candidates[c], inputs[i]
        x[:] = 0.0
        occurrences = np.int64(request.counts[find(request, candidate.token)])
        x[CANDIDATE.store] = math.log(max(probable[BY_STORE, c], 1e-7))
        x[CANDIDATE.request] = math.log(max(probable[BY_REQUEST, c], 1e-6))
        log_occurrences = _LOG_COUNT[occurrences] if occurrences < 512 else math.log(occurrences + 0.1)
        x[CANDIDATE.surplus] = log_occurrences - math.log(len(request.tokens) * probable[SHARE, c] + 0.5)
        for s in range(n_seen):
            column = _COUNT_COLUMNS[seen[s]]
            x[CANDIDATE.store_counts + seen[s]] = _LOG_COUNT[counts[column, c]] - _LOG_TOTAL[columns[column].total]
        if counts[COLUMN.store + MANY, c] > 0:
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


def _sums(context, builder, signature, args, count):
    """Vectors start + values[i, k] * layer[k] + ..., for every k of `active` in this order, for i in range(count): side
    by side, since each sum waits for its last term. args: those of `_add_row`."""
    arrays = [context.make_array(kind)(context, builder, arg) for kind, arg in zip(signature.args, args, strict=True)]
    start, layer, values, active = arrays[:4]
    width, zero = context.get_constant(types.intp, WIDTH), context.get_constant(types.intp, 0)

    def load(array, at):
        place = builder.gep(array.data, [builder.mul(at, width)])
        return builder.load(builder.bitcast(place, _VECTOR.as_pointer()), align=4)

    columns = cgutils.unpack_tuple(builder, values.shape)[1]
    own = [builder.gep(values.data, [builder.mul(columns, columns.type(i))]) for i in range(count)]
    totals = [cgutils.alloca_once_value(builder, load(start, zero)) for _ in own]
    with cgutils.for_range(builder, cgutils.unpack_tuple(builder, active.shape)[0]) as loop:
        k = builder.sext(builder.load(builder.gep(active.data, [loop.index])), zero.type)
        weights = load(layer, k)
        for numbers, total in zip(own, totals, strict=True):
            value = builder.insert_element(_NONE, builder.load(builder.gep(numbers, [k])), _INT(0))
            value = builder.shuffle_vector(value, value, ir.Constant(ir.VectorType(_INT, WIDTH), [0] * WIDTH))
            builder.store(builder.fadd(builder.load(total), builder.fmul(value, weights)), total)
    return [builder.load(total) for total in totals], arrays[4:]


@intrinsic
def _add_row(typingctx, start, layer, values, active, target):
    """Write start + values[0, k] * layer[k] + ..., for every k of `active` in this order. start, target: float32
    [WIDTH]; layer: float32 [R, WIDTH]; values: float32 [N, F]; active: int32 [n]; all contiguous."""

    def codegen(context, builder, signature, args):
        (total,), (end,) = _sums(context, builder, signature, args, 1)
        builder.store(total, builder.bitcast(end.data, _VECTOR.as_pointer()), align=4)
        return context.get_dummy_value()

    return types.void(start, layer, values, active, target), codegen


@intrinsic
def _write_logits(typingctx, start, layer, values, active, out, logits):
    """Write logits[i], float64, for BLOCK hidden layers as of `_add_row`; units are added in halves."""

    def codegen(context, builder, signature, args):
        layers, (out, logits) = _sums(context, builder, signature, args, BLOCK)
        weights = builder.load(builder.bitcast(out.data, _VECTOR.as_pointer()), align=4)
        linear = ir.Constant(ir.VectorType(ir.IntType(1), WIDTH), [0] * (WIDTH - 1) + [1])
        zeros = ir.Constant(_VECTOR, [0.0] * WIDTH)
        for i, hidden in enumerate(layers):
            terms = builder.select(builder.or_(builder.fcmp_ordered(">", hidden, zeros), linear), hidden, zeros)
            terms, size = builder.fmul(terms, weights), WIDTH
            while size > 1:
                size //= 2
                halves = (ir.Constant(ir.VectorType(_INT, size), [*range(at, at + size)]) for at in (0, size))
                terms = builder.fadd(*(builder.shuffle_vector(terms, terms, half) for half in halves))
            logit = builder.fpext(builder.extract_element(terms, _INT(0)), ir.DoubleType())
            builder.store(logit, builder.gep(logits.data, [_INT(i)]))
        return context.get_dummy_value()

    return types.void(start, layer, values, active, out, logits), codegen


@lean
def _present(x, active):
    """Write which inputs are not 0 in the first or last row of x; return their number."""
    n, last = 0, len(x) - 1
    for k in range(x.shape[1]):
        active[n] = k
        n += (x[0, k] != 0.0) | (x[last, k] != 0.0)
    return n


@lean(inline="always")
def evaluate(scratch, m, layer, out):
    """Write the network's logits of m candidates, in float32: rows of inputs that are not 0 are added in order, common
    inputs first."""
    inputs, extremes, common, active = scratch.inputs, scratch.extremes, scratch.common, scratch.active
    for k in range(INPUTS):
        extremes[0, k] = extremes[1, k] = inputs[0, k]
    for i in range(1, m):
        for k in range(INPUTS):
            extremes[0, k] = max(extremes[0, k], inputs[i, k])
            extremes[1, k] = min(extremes[1, k], inputs[i, k])
    some = active[: _present(scratch.node_inputs, active)]
    _add_row(layer[ROW.bias], layer[ROW.node :], scratch.node_inputs, some, common)
    some = active[: _present(extremes, active)]
    _add_row(common, layer[ROW.largest :], extremes, some, common)
    for i in range(0, m, BLOCK):
        _write_logits(common, layer[ROW.candidate :], inputs[i:], some, out, scratch.probabilities[i:])
