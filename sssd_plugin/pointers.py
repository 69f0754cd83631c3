"""Arrays from addresses inside compiled code.

One compiled call serves a whole batch whose requests and sub-indices own arrays of their own; a table of addresses
crosses into the call at the price of one array, however many there are. Whoever fills such a table keeps the arrays
alive for as long as it is used.
"""

from __future__ import annotations

from numba import carray, njit, types
from numba.extending import intrinsic


@intrinsic
def _int32_pointer(typingctx, address):
    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.int32)(types.int64), codegen


@intrinsic
def _uint16_pointer(typingctx, address):
    def codegen(context, builder, signature, args):
        return builder.inttoptr(args[0], context.get_value_type(signature.return_type))

    return types.CPointer(types.uint16)(types.int64), codegen


@njit(nogil=True, cache=True)
def int32_at(address, n):
    """View of n int32 at `address`."""
    return carray(_int32_pointer(address), (n,))


@njit(nogil=True, cache=True)
def uint16_at(address, n):
    """View of n uint16 at `address`."""
    return carray(_uint16_pointer(address), (n,))
