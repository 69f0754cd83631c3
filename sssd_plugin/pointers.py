"""Arrays from addresses inside compiled code.

One compiled call serves a whole batch of requests and sub-indices with arrays of their own. Passing a table of
addresses costs as much as passing one array. The owner of the table keeps the arrays alive.
"""

from functools import reduce

from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array


@intrinsic
def array_at(typingctx, address, shape, dtype):
    """Return a contiguous array of a shape, a tuple, with elements of a dtype or record, at an address."""
    array, sizes = types.Array(dtype.dtype, len(shape), "C"), types.UniTuple(types.intp, len(shape))

    def codegen(context, builder, signature, args):
        kind = context.get_data_type(array.dtype)
        itemsize = context.get_constant(types.intp, context.get_abi_sizeof(kind))
        shape = cgutils.unpack_tuple(builder, args[1])
        strides = [reduce(builder.mul, shape[k + 1 :], itemsize) for k in range(len(shape))]
        data = builder.inttoptr(args[0], kind.as_pointer())
        result = context.make_array(array)(context, builder)
        populate_array(result, data=data, shape=shape, strides=strides, itemsize=itemsize, meminfo=None)
        return result._getvalue()

    return array(types.int64, sizes, dtype), codegen
