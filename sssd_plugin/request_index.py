"""`RequestIndex`: for each request, its tokens so far and where each token occurred before.

A hash chain over the token array itself: `heads` maps a token to its newest position, `previous[i]` links position i to
the next older position of the same token. Every token is visible at the next step, and a token costs 8 bytes plus its
share of the table, where a trie of n-grams (papers/sssd.txt A.1) costs hundreds.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from sssd_plugin.pointers import int32_at, uint16_at

# Columns of the slot table: addresses of a request's arrays, then their fill and sizes.
TOKENS, PREVIOUS, HEADS, COUNTS, LENGTH, CAPACITY, TABLE_SIZE, DISTINCT = range(8)
COLUMNS = 8

_MIN_TABLE = 64
_MIN_ROOM = 64  # tokens of room beyond the present length


@njit(nogil=True, cache=True)
def find(heads, table_size, tokens, token):
    """Entry of `token` in the open-addressing table `heads`, or the empty entry where it belongs."""
    mixed = (np.uint64(token) * np.uint64(2654435761)) & np.uint64(0xFFFFFFFF)
    i = np.int64((mixed * np.uint64(table_size)) >> np.uint64(32))
    while heads[i] >= 0 and tokens[heads[i]] != token:
        i = np.int64(i + 1 if i + 1 < table_size else 0)
    return i


@njit(nogil=True, cache=True)
def _reset(slots, s):
    int32_at(slots[s, HEADS], slots[s, TABLE_SIZE])[:] = -1
    uint16_at(slots[s, COUNTS], slots[s, TABLE_SIZE])[:] = 0
    slots[s, LENGTH] = 0
    slots[s, DISTINCT] = 0


@njit(nogil=True, cache=True)
def _ingest(slots, s, new, shift, target):
    """Append until the request has `target` tokens, position i being `new[i + shift]`; False if the slot must grow.

    What was appended before that stays, so after growing the call is simply repeated.
    """
    if target > slots[s, CAPACITY]:
        return False
    n = slots[s, LENGTH]
    size = slots[s, TABLE_SIZE]
    tokens = int32_at(slots[s, TOKENS], slots[s, CAPACITY])
    previous = int32_at(slots[s, PREVIOUS], slots[s, CAPACITY])
    heads = int32_at(slots[s, HEADS], size)
    counts = uint16_at(slots[s, COUNTS], size)
    distinct = slots[s, DISTINCT]
    limit = size - (size >> 3)  # past 7/8 full, probing slows down
    while n < target:
        token = new[n + shift]
        i = find(heads, size, tokens, token)
        if heads[i] < 0:
            if distinct >= limit:
                break
            distinct += 1
        tokens[n] = token
        previous[n] = heads[i]
        heads[i] = n
        if counts[i] < 65535:
            counts[i] += 1
        n += 1
    slots[s, LENGTH] = n
    slots[s, DISTINCT] = distinct
    return n >= target


@njit(nogil=True, cache=True)
def _extend_rows(slots, slot_ids, token_rows, rows, lengths, start):
    """Bring each request up to `token_rows[rows[b], :lengths[b]]`; the first b that must grow, or len(slot_ids)."""
    for b in range(start, len(slot_ids)):
        s = slot_ids[b]
        row = token_rows[rows[b]]
        n = slots[s, LENGTH]
        if n > lengths[b] or (n > 0 and int32_at(slots[s, TOKENS], n)[n - 1] != row[n - 1]):
            _reset(slots, s)  # the engine rolled the request back: rare, so start over
        if not _ingest(slots, s, row, 0, lengths[b]):
            return b
    return len(slot_ids)


@njit(nogil=True, cache=True)
def _append_ragged(slots, slot_ids, new, offsets, targets, start):
    """Append `new[offsets[b]:offsets[b + 1]]`, to reach `targets[b]` tokens; the first b that must grow, or the end."""
    for b in range(start, len(slot_ids)):
        if not _ingest(slots, slot_ids[b], new, offsets[b + 1] - targets[b], targets[b]):
            return b
    return len(slot_ids)


@njit(nogil=True, cache=True)
def _rehash(heads, counts, size, old_heads, old_counts, tokens):
    for k in range(len(old_heads)):
        if old_heads[k] >= 0:
            i = find(heads, size, tokens, tokens[old_heads[k]])
            heads[i] = old_heads[k]
            counts[i] = old_counts[k]


class RequestIndex:
    """Tokens of every live request, addressed by request id. Not thread-safe: the drafter serialises its callers.

    Attributes:
        slots: int64 [S, COLUMNS], one row of addresses and sizes per request; compiled code reads it.
    """

    def __init__(self, max_requests: int = 64) -> None:
        self.slots = np.zeros((max(1, max_requests), COLUMNS), np.int64)
        self._slot_of: dict[str, int] = {}
        self._free = list(range(len(self.slots) - 1, -1, -1))
        # tokens, previous, heads, counts of each slot: what keeps the addresses in `slots` valid
        self._arrays: list[tuple[NDArray, NDArray, NDArray, NDArray] | None] = [None] * len(self.slots)

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._slot_of

    def slot_ids(self, request_ids: Sequence[str], create: bool = True) -> NDArray[np.int64]:
        """Slot of each request: int64 [B]. Unknown requests start empty; with `create` off, they get -1."""
        slot_of = self._slot_of
        try:
            return np.array([slot_of[r] for r in request_ids], np.int64)
        except KeyError:
            if not create:
                return np.array([slot_of.get(r, -1) for r in request_ids], np.int64)
        return np.array([slot_of[r] if r in slot_of else self._start(r) for r in request_ids], np.int64)

    def extend(
        self,
        slot_ids: NDArray[np.int64],
        token_rows: NDArray[np.int32],
        rows: NDArray[np.int32],
        lengths: NDArray[np.int32],
    ) -> None:
        """Make request b hold `token_rows[rows[b], :lengths[b]]`; only tokens that are new are read.

        Args:
            slot_ids: int64 [B], from `slot_ids`.
            token_rows: int32 [R, L]; rows: int32 [B]; lengths: int32 [B], each at most L.
        """
        b = _extend_rows(self.slots, slot_ids, token_rows, rows, lengths, 0)
        while b < len(slot_ids):
            self._grow(int(slot_ids[b]), int(lengths[b]))
            b = _extend_rows(self.slots, slot_ids, token_rows, rows, lengths, b)

    def append(self, slot_ids: NDArray[np.int64], tokens: NDArray[np.int32], offsets: NDArray[np.int64]) -> None:
        """Append `tokens[offsets[b]:offsets[b + 1]]` to request b. tokens: int32 [T]; offsets: int64 [B + 1]."""
        targets = self.slots[slot_ids, LENGTH] + np.diff(offsets)
        b = _append_ragged(self.slots, slot_ids, tokens, offsets, targets, 0)
        while b < len(slot_ids):
            self._grow(int(slot_ids[b]), int(targets[b]))
            b = _append_ragged(self.slots, slot_ids, tokens, offsets, targets, b)

    def request_ids(self) -> list[str]:
        return list(self._slot_of)

    def tokens(self, request_id: str) -> NDArray[np.int32]:
        """Tokens of a request so far: int32 [n], a view that the next append may invalidate."""
        slot = self._slot_of[request_id]
        arrays = self._arrays[slot]
        assert arrays is not None
        return arrays[0][: self.slots[slot, LENGTH]]

    def length(self, request_id: str) -> int:
        slot = self._slot_of.get(request_id)
        return 0 if slot is None else int(self.slots[slot, LENGTH])

    def finish(self, request_ids: Iterable[str]) -> None:
        """Forget requests. Unknown ids are ignored."""
        for request_id in request_ids:
            slot = self._slot_of.pop(request_id, None)
            if slot is not None:
                self.slots[slot] = 0
                self._arrays[slot] = None
                self._free.append(slot)

    def nbytes(self) -> int:
        """Bytes held by all requests."""
        return sum(a.nbytes for arrays in self._arrays if arrays is not None for a in arrays)

    def _start(self, request_id: str) -> int:
        if not self._free:
            old = len(self.slots)
            self.slots = np.concatenate([self.slots, np.zeros_like(self.slots)])
            self._arrays += [None] * old
            self._free = list(range(2 * old - 1, old - 1, -1))
        slot = self._slot_of[request_id] = self._free.pop()
        self._allocate(slot, _MIN_ROOM, _MIN_TABLE)
        return slot

    def _allocate(self, slot: int, capacity: int, table_size: int) -> None:
        tokens, previous = np.empty(capacity, np.int32), np.empty(capacity, np.int32)
        heads, counts = np.full(table_size, -1, np.int32), np.zeros(table_size, np.uint16)
        row, old = self.slots[slot], self._arrays[slot]
        if old is not None:
            n = row[LENGTH]
            tokens[:n], previous[:n] = old[0][:n], old[1][:n]
            _rehash(heads, counts, table_size, old[2], old[3], tokens)
        self._arrays[slot] = (tokens, previous, heads, counts)
        row[[TOKENS, PREVIOUS, HEADS, COUNTS]] = [a.ctypes.data for a in (tokens, previous, heads, counts)]
        row[CAPACITY], row[TABLE_SIZE] = capacity, table_size

    def _grow(self, slot: int, target: int) -> None:
        row = self.slots[slot]
        capacity, table_size = int(row[CAPACITY]), int(row[TABLE_SIZE])
        if target > capacity:
            capacity = target + max(_MIN_ROOM, target >> 6)
            table_size = max(table_size, (target - int(row[LENGTH])) >> 2)  # text repeats at least that much
        else:
            table_size += table_size >> 1
        self._allocate(slot, capacity, table_size)
