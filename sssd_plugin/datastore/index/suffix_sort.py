"""Sorting the suffixes of a run of tokens in little memory.

pydivsufsort sorts the suffixes of bytes. Ids are re-ranked densely and written as big-endian numbers of as few bytes w
as hold them, 1 to 4, so that the order of bytes is the order of tokens; of the byte suffixes, those at multiples of w
are kept, in place. The peak is 5 w bytes per token: 10 for up to 65,536 different ids, 15 for up to 16.7 million.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from sssd_plugin.datastore.index.sub_index import SEPARATOR

_BLOCK = 1 << 18
_MAX_TABLE = 1 << 24
_TABLE_PER_TOKEN = 16
MAX_SORTED_BYTES = (1 << 31) - 1
"""Beyond it pydivsufsort needs 8 bytes of order per byte of text instead of 4."""


def width_of(n_distinct: int) -> int:
    """Return the bytes per token for so many different ids, the separator included."""
    return max(1, ((n_distinct - 1).bit_length() + 7) // 8)


def to_bytes(tokens: NDArray[np.int32]) -> NDArray[np.uint8]:
    """Return dense ranks of `tokens` (int32 [n], each at least -1) as big-endian bytes: uint8 [n, w]."""
    blocks = range(0, len(tokens), _BLOCK)
    largest = max((int(tokens[a : a + _BLOCK].max()) for a in blocks), default=SEPARATOR)
    # A table beats a search per token, unless it is much larger than the text.
    if largest < min(_MAX_TABLE, _BLOCK + _TABLE_PER_TOKEN * len(tokens)):
        present = np.zeros(largest + 2, bool)
        for a in blocks:
            present[tokens[a : a + _BLOCK] + 1] = True
        width = width_of(int(np.count_nonzero(present)))
        ranks = np.cumsum(present, dtype=np.uint32) - np.uint32(1)
        table = _big_endian(ranks, width)
        text = np.empty((len(tokens), width), np.uint8)
        for a in blocks:
            np.take(table, tokens[a : a + _BLOCK] + 1, axis=0, out=text[a : a + _BLOCK])
        return text
    seen = np.unique(tokens)
    width = width_of(len(seen))
    text = np.empty((len(tokens), width), np.uint8)
    for a in blocks:
        text[a : a + _BLOCK] = _big_endian(np.searchsorted(seen, tokens[a : a + _BLOCK]), width)
    return text


def sort_bytes(text: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Return the suffix array of `text` (uint8 [n, w], contiguous), counted in tokens: int32 or int64 [n].

    The result is a view of a buffer w times as large: copy it to keep it.
    """
    n, width = text.shape
    if n == 0:
        return np.zeros(0, np.int32)
    import pydivsufsort

    order = pydivsufsort.divsufsort(text.reshape(-1))
    if width == 1:
        return order
    kept = 0
    for a in range(0, len(order), _BLOCK):
        block = order[a : a + _BLOCK]
        aligned = block[block % width == 0] // width
        order[kept : kept + len(aligned)] = aligned
        kept += len(aligned)
    return order[:n]


def sort_suffixes(tokens: NDArray[np.int32]) -> NDArray[np.int32]:
    """Return the starts of the suffixes of `tokens` (int32 [n]), separators' left out, in lexicographic order."""
    separators = int(np.count_nonzero(tokens == SEPARATOR))
    return np.array(sort_bytes(to_bytes(tokens))[separators:], np.int32)


def _big_endian(numbers: NDArray, width: int) -> NDArray[np.uint8]:
    return np.ascontiguousarray(numbers.astype(">u4").view(np.uint8).reshape(-1, 4)[:, 4 - width :])
