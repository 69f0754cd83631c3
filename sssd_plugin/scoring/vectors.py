"""Vectors of float32 inside compiled code: short loops over arrays that may overlap are not vectorised."""

from __future__ import annotations

from functools import partial

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from sssd_plugin.scoring.weights import WIDTH

_VECTOR = ir.VectorType(ir.FloatType(), WIDTH)


def _array(context, builder, form, value):
    return context.make_array(form)(context, builder, value)


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
        make, at = partial(_array, context, builder), partial(_row, context, builder)
        begin, rows, numbers, end = (make(signature.args[i], args[i]) for i in (0, 1, 3, 5))
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
