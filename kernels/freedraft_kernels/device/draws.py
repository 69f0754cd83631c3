"""The random draws of `freedraft_kernels.draws`, inside kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from freedraft_kernels.draws import STREAM

_STREAM = tl.constexpr(STREAM)


@triton.jit
def draw(seed, position, node):
    """The 48-bit draw of (seed int64, position, node int32), as int64."""
    x0, x1, _, _ = tl.philox(seed, node, position.to(tl.int32), 0, _STREAM)
    return (x0.to(tl.int64) << 16) | (x1.to(tl.int64) >> 16)


@triton.jit
def scale(draw, total):
    """floor(draw * total / 2**48), exactly, for draw < 2**48 and 0 <= total < 2**47."""
    a = draw >> 32
    b = (draw >> 16) & 0xFFFF
    c = draw & 0xFFFF
    return (a * total + ((b * total + ((c * total) >> 16)) >> 16)) >> 16
