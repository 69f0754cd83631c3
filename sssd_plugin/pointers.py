"""Arrays from addresses inside compiled code.

One compiled call serves a whole batch of requests and sub-indices with arrays of their own. Passing a table of
addresses costs as much as passing one array. The owner of the table keeps the arrays alive.
"""

import numpy as np
from numba import carray, types
from numba.extending import intrinsic

from freedraft.compiled import compiled


@intrinsic
def _pointer(typingctx, address, dtype):
    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(dtype.dtype)(types.int64, dtype), codegen


@compiled(nogil=True)
def array_at(address, shape, dtype):
    """Return an array of a dtype or a record, and the next address on a cache line of its own."""
    array = carray(_pointer(address, dtype), shape)
    return array, (address + array.size * array.itemsize + 63) // 64 * 64


@compiled(nogil=True)
def borrowed(array):
    """Return a contiguous array without its owner: passing it on counts no references, as the caller keeps it alive."""
    return carray(_pointer(array.ctypes.data, array.dtype), array.shape)


@compiled(nogil=True)
def int32_at(address, n):
    return carray(_pointer(address, np.int32), (n,))


@compiled(nogil=True)
def uint16_at(address, n):
    return carray(_pointer(address, np.uint16), (n,))
