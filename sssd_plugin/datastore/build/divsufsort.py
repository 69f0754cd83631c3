"""Sorting suffixes with pydivsufsort (libdivsufsort): faster than `sorted_arrays`, in more memory. It sorts bytes.

Ids are encoded big-endian in a fixed number of bytes, so suffixes of bytes that start at an id have the order of
suffixes of ids; the others are dropped. They are compared beyond the end of their document, so those that are equal for
`sorted_arrays` may be in another order.
"""

import importlib.util

import numpy as np
from numpy.typing import NDArray

from freedraft.compiled import compiled
from sssd_plugin.datastore.index.sub_index import PAD


def can_sort(n: int, largest: int, memory: int) -> bool:
    """Return whether pydivsufsort is installed and can sort n tokens, ids up to `largest`, in `memory` bytes, tokens
    included."""
    width = _width(largest)
    # A token, its bytes, the position of each byte (int32), and a sparse index.
    fits = n * (4 + 5 * width + 1) <= memory and n * width < 1 << 31
    return fits and importlib.util.find_spec("pydivsufsort") is not None


def sort_suffixes(tokens: NDArray[np.int32], largest: int) -> NDArray[np.int32]:
    """Return the suffix array (int32 [m]) of tokens (int32 [n + PAD]), as of `SubIndex`."""
    from pydivsufsort import divsufsort

    width = _width(largest)
    numbers = (tokens[: len(tokens) - PAD].view(np.uint32) + np.uint32(1)).astype(">u4")  # 0 is the separator
    places = divsufsort(numbers.view(np.uint8).reshape(-1, 4)[:, 4 - width :].ravel())
    return places[: _keep_suffixes(tokens, width, places)]


def _width(largest: int) -> int:  # bytes of an id plus one
    return max(2, -(-(largest + 1).bit_length() // 8))


@compiled(nogil=True)
def _keep_suffixes(tokens, width, places):
    """Turn positions of bytes into suffixes in place; return their number."""
    m = 0
    for place in places:
        if place % width == 0 and tokens[place // width] >= 0:
            places[m] = place // width
            m += 1
    return m
