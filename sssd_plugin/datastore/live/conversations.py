"""`KnownBeginnings`: each turn of a conversation begins with the turns before, which are held already."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from freedraft.compiled import compiled
from sssd_plugin.datastore.index.suffix_sort import DEPTH

BLOCK = 256


@compiled(nogil=True)
def _keys(tokens, seed):
    """Return a hash of each full block of tokens (int32 [n]), chained to those before: uint64 [n // BLOCK]."""
    keys = np.empty(len(tokens) // BLOCK, np.uint64)
    key = np.uint64(seed)
    for i in range(len(keys) * BLOCK):
        key = (key ^ np.uint64(tokens[i])) * np.uint64(0x9E3779B97F4A7C15)
        key ^= key >> np.uint64(29)
        if i % BLOCK == BLOCK - 1:
            keys[i // BLOCK] = key
    return keys


class KnownBeginnings:
    """Remembers how documents began, by hashes of their blocks; the oldest of `max_tokens` go first. Two that collide
    would cost a tenant a piece of its own text."""

    def __init__(self, max_tokens: int) -> None:
        self._max_blocks = max(1, max_tokens // BLOCK)
        self._known: OrderedDict[int, None] = OrderedDict()
        _keys(np.zeros(1, np.int32), 1)
        self.clear = self._known.clear

    def new_part(self, tokens: NDArray[np.int32], tenant: int) -> NDArray[np.int32]:
        """Return the part of a document (int32 [n]) that no earlier one of the tenant began with, and the `DEPTH`
        tokens before it, so that drafts lead into it; and remember the document."""
        keys = _keys(np.ascontiguousarray(tokens, np.int32), 1 + tenant).tolist()
        known = 0
        while known < len(keys) and keys[known] in self._known:
            self._known.move_to_end(keys[known])
            known += 1
        self._known.update(dict.fromkeys(keys[known:]))
        while len(self._known) > self._max_blocks:
            self._known.popitem(last=False)
        return tokens[max(0, known * BLOCK - DEPTH) :]
