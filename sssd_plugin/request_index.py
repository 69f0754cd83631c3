"""`RequestIndex`: for each request, its tokens so far, and where each token and each four of them occurred before.

Two hash chains run over the token array itself. `heads` maps a token to its newest position, and `previous[i]` links
position i to the next older position of the same token; `gram_heads` and `gram_previous` do so for the last four tokens
at a position, so that a copy from a long context is found however common its single tokens are. Every token is visible
at the next step. A token costs 12 bytes plus its share of the tables, where a trie of n-grams (arXiv 2411.05894, A.1)
costs hundreds.

The hash functions are seeded, so that no client can choose tokens that collide.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freedraft.compiled import compiled
from sssd_plugin.pointers import int32_at, uint16_at

# Columns of the slot table: addresses of a request's arrays, their fill and sizes, the seed of their hash functions.
TOKENS, PREVIOUS, HEADS, COUNTS, GRAM_PREVIOUS, GRAM_HEADS = range(6)
LENGTH, CAPACITY, TABLE_SIZE, GRAM_TABLE_SIZE, DISTINCT, SEED = range(6, 12)
COLUMNS = 12

GRAM = 4  # tokens that `gram_heads` hashes
OUTSIDE = -2  # in place of ids that the vocabulary does not have, as an image's: no store holds it, and no draft

_MIN_TABLE = 64
_MIN_GRAM_TABLE = 16
_MIN_SPARE = 64  # tokens of capacity beyond the present length


class Request(NamedTuple):
    """The index of one request, as compiled code reads it.

    `heads` is an open-addressing hash table; both hash functions have the seed.
    """

    tokens: NDArray[np.int32]  # [n], the prompt and the output so far
    previous: NDArray[np.int32]  # [n], the next older position of the same token, -1 where there is none
    heads: NDArray[np.int32]  # [T], the newest position of each token, -1 in empty entries
    counts: NDArray[np.uint16]  # [T], how often the token of each entry occurs, at most 65535
    # [n], the next older position whose last four tokens have the same hash, -1 for none; not set at the first three.
    gram_previous: NDArray[np.int32]
    gram_heads: NDArray[np.int32]  # [G], the newest position by hash of its last four tokens, -1 for none
    seed: np.int64

    @property
    def arrays(self) -> tuple[NDArray[Any], ...]:
        """All but the seed, in the order of the slot table's columns."""
        return self.tokens, self.previous, self.heads, self.counts, self.gram_previous, self.gram_heads


@compiled(nogil=True)
def _request(slots, s, n):
    size = slots[s, TABLE_SIZE]
    return Request(
        int32_at(slots[s, TOKENS], n),
        int32_at(slots[s, PREVIOUS], n),
        int32_at(slots[s, HEADS], size),
        uint16_at(slots[s, COUNTS], size),
        int32_at(slots[s, GRAM_PREVIOUS], n),
        int32_at(slots[s, GRAM_HEADS], slots[s, GRAM_TABLE_SIZE]),
        slots[s, SEED],
    )


@compiled(nogil=True)
def request_at(slots, s):
    """Return the `Request` in slot s."""
    return _request(slots, s, slots[s, LENGTH])


@compiled(nogil=True)
def mix(x):
    """Return a hash of x (uint64), 64 bits, each of which depends on all of x (splitmix64, Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@compiled(nogil=True)
def _upper_mix(x):
    return mix(x) >> np.uint64(32)


@compiled(nogil=True)
def find(request, token):
    """Return the entry of `token` in the hash table `heads`, or the empty entry where it belongs."""
    heads, tokens = request.heads, request.tokens
    size = len(heads)
    i = np.int64((_upper_mix(np.uint64(token) + np.uint64(request.seed)) * np.uint64(size)) >> np.uint64(32))
    while heads[i] >= 0 and tokens[heads[i]] != token:
        i = np.int64(i + 1 if i + 1 < size else 0)
    return i


@compiled(nogil=True)
def find_gram(request, a, b, c, d):
    """Return the entry of `gram_heads` for the four tokens a, b, c, d, in the order of the text."""
    one = (np.uint64(a) << np.uint64(32)) | np.uint64(b)
    two = (np.uint64(c) << np.uint64(32)) | np.uint64(d)
    mixed = _upper_mix((_upper_mix(one + np.uint64(request.seed)) << np.uint64(32)) ^ two ^ np.uint64(request.seed))
    return np.int64((mixed * np.uint64(len(request.gram_heads))) >> np.uint64(32))


@compiled(nogil=True)
def _older_gram(request, i, before, a, b, c, d):
    """Return the first position in the chain from i on, under `before`, that ends a, b, c, d; -1 for none."""
    tokens = request.tokens
    while i >= 0 and not (
        i < before and tokens[i] == d and tokens[i - 1] == c and tokens[i - 2] == b and tokens[i - 3] == a
    ):
        i = request.gram_previous[i]
    return np.int64(i)


@compiled(nogil=True)
def newest_gram(request, before, a, b, c, d):
    """Return the newest position under `before` that ends the tokens a, b, c, d, -1 for none.

    What else has the same hash is passed over, however much it is: drafts must not depend on the seed, which differs
    from one tensor-parallel rank to the next.
    """
    return _older_gram(request, request.gram_heads[find_gram(request, a, b, c, d)], before, a, b, c, d)


@compiled(nogil=True)
def older_gram(request, i):
    """Return the newest position under i that ends the same four tokens as i does, -1 for none."""
    tokens = request.tokens
    return _older_gram(request, request.gram_previous[i], i, tokens[i - 3], tokens[i - 2], tokens[i - 1], tokens[i])


@compiled(nogil=True)
def _link_gram(request, i):
    tokens = request.tokens
    if i >= GRAM - 1:
        entry = find_gram(request, tokens[i - 3], tokens[i - 2], tokens[i - 1], tokens[i])
        request.gram_previous[i] = request.gram_heads[entry]
        request.gram_heads[entry] = i


@compiled(nogil=True)
def ingest(slots, s, new, shift, target):
    """Append until the request has `target` tokens, position i being `new[i + shift]`; False if the slot must grow.

    What was appended before that stays, so after growing the call is simply repeated.
    """
    if target > slots[s, CAPACITY]:
        return False
    n, distinct = slots[s, LENGTH], slots[s, DISTINCT]
    request = _request(slots, s, slots[s, CAPACITY])
    tokens, previous, heads, counts = request.tokens, request.previous, request.heads, request.counts
    max_distinct = len(heads) - (len(heads) >> 3)  # past 7/8 full, probing slows down
    while n < target:
        token = new[n + shift]
        i = find(request, token)
        if heads[i] < 0:
            if distinct >= max_distinct:
                break
            distinct += 1
        tokens[n] = token
        previous[n] = heads[i]
        heads[i] = n
        if counts[i] < 65535:
            counts[i] += 1
        _link_gram(request, n)
        n += 1
    slots[s, LENGTH] = n
    slots[s, DISTINCT] = distinct
    return n >= target


@compiled(nogil=True)
def _update(slots, slot_ids, tokens, starts, ends, contexts, stale, resumed):
    """Append as `RequestIndex.update` does, from row `resumed` on, whose slot has grown; -1 in the first call. Writes
    into `stale` (int64 [> B]) the number of rows left untouched, then these rows. Returns the row whose slot must grow
    before the call is repeated. At the end: -1, or -2 if rows were left untouched."""
    if resumed < 0:
        stale[0] = 0
    for b in range(max(resumed, 0), len(slot_ids)):
        s = slot_ids[b]
        if b != resumed and (s < 0 or slots[s, LENGTH] + ends[b] - starts[b] != contexts[b]):
            stale[0] += 1
            stale[stale[0]] = b
        elif not ingest(slots, s, tokens, ends[b] - contexts[b], np.int64(contexts[b])):
            return b
    return -1 if stale[0] == 0 else -2


@compiled(nogil=True)
def _copy(request, old, n):
    """Fill new arrays with the first n tokens of old ones, of which some may be as large."""
    request.tokens[:n] = old.tokens[:n]
    request.previous[:n] = old.previous[:n]
    for k in range(len(old.heads)):
        if old.heads[k] >= 0:
            i = find(request, request.tokens[old.heads[k]])
            request.heads[i] = old.heads[k]
            request.counts[i] = old.counts[k]
    if len(request.gram_heads) == len(old.gram_heads):
        request.gram_heads[:] = old.gram_heads
        request.gram_previous[:n] = old.gram_previous[:n]
    else:
        for i in range(n):
            _link_gram(request, i)


class RequestIndex:
    """The tokens of every live request, addressed by request id. It is not thread-safe: the drafter serialises calls.

    Attributes:
        slots: int64 [S, COLUMNS], one row of addresses and sizes per request; compiled code reads it.
        seed: of the hash functions; random, unless one is given.
    """

    def __init__(self, max_requests: int = 64, seed: int | None = None) -> None:
        self.seed = secrets.randbits(62) if seed is None else seed
        self.slots = np.zeros((max(1, max_requests), COLUMNS), np.int64)
        self._slot_of: dict[str, int] = {}
        self._free = list(range(len(self.slots) - 1, -1, -1))
        self._arrays: list[Request | None] = [None] * len(self.slots)  # they keep the addresses in `slots` valid
        self._stale = np.zeros(len(self.slots) + 1, np.int64)

    def __len__(self) -> int:
        return len(self._slot_of)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._slot_of

    def slot_ids(self, request_ids: Sequence[str]) -> NDArray[np.int64]:
        """Return the slot of each request: int64 [B], -1 where it is unknown."""
        slot_of = self._slot_of
        return np.array([slot_of.get(request_id, -1) for request_id in request_ids], np.int64)

    def update(
        self, slot_ids: NDArray[np.int64], tokens: NDArray[np.int32], starts: NDArray[np.int64],
        ends: NDArray[np.int64], contexts: NDArray[np.int32],
    ) -> list[int]:  # fmt: skip
        """Append tokens to the requests in these slots (int64 [B]) as `Drafter.update` does; return the same rows."""
        if len(slot_ids) >= len(self._stale):
            self._stale = np.zeros(2 * len(slot_ids), np.int64)
        b = _update(self.slots, slot_ids, tokens, starts, ends, contexts, self._stale, -1)
        while b >= 0:
            self._grow(int(slot_ids[b]), int(contexts[b]))
            b = _update(self.slots, slot_ids, tokens, starts, ends, contexts, self._stale, b)
        return [] if b == -1 else self._stale[1 : self._stale[0] + 1].tolist()

    def replace(self, request_id: str, tokens: NDArray[np.int32]) -> None:
        """Make the request, known or not, hold exactly `tokens` (int32 [n])."""
        self.finish([request_id])
        slot = self._start(request_id)
        while not ingest(self.slots, slot, tokens, 0, len(tokens)):
            self._grow(slot, len(tokens))

    def request_ids(self) -> list[str]:
        return list(self._slot_of)

    def tokens(self, request_id: str) -> NDArray[np.int32]:
        """Return the tokens of a request so far: int32 [n], a view that the next update may invalidate."""
        slot = self._slot_of[request_id]
        request = self._arrays[slot]
        assert request is not None
        return request.tokens[: self.slots[slot, LENGTH]]

    def finish(self, request_ids: Iterable[str]) -> None:
        """Forget requests. Unknown ids are ignored."""
        for request_id in request_ids:
            slot = self._slot_of.pop(request_id, None)
            if slot is not None:
                self.slots[slot] = 0
                self._arrays[slot] = None
                self._free.append(slot)

    def nbytes(self) -> int:
        """Return the bytes that all requests hold."""
        return sum(array.nbytes for request in self._arrays if request is not None for array in request.arrays)

    def _start(self, request_id: str) -> int:
        if not self._free:
            old = len(self.slots)
            self.slots = np.concatenate([self.slots, np.zeros_like(self.slots)])
            self._arrays += [None] * old
            self._free = list(range(2 * old - 1, old - 1, -1))
        slot = self._slot_of[request_id] = self._free.pop()
        self._allocate(slot, _MIN_SPARE, _MIN_TABLE, _MIN_GRAM_TABLE)
        return slot

    def _allocate(self, slot: int, capacity: int, table_size: int, gram_table_size: int) -> None:
        tokens, previous, gram_previous = (np.empty(capacity, np.int32) for _ in range(3))
        heads, gram_heads = (np.full(size, -1, np.int32) for size in (table_size, gram_table_size))
        counts = np.zeros(table_size, np.uint16)
        new = Request(tokens, previous, heads, counts, gram_previous, gram_heads, np.int64(self.seed))
        row, old = self.slots[slot], self._arrays[slot]
        if old is not None:
            _copy(new, old, row[LENGTH])
        self._arrays[slot] = new
        row[: GRAM_HEADS + 1] = [array.ctypes.data for array in new.arrays]
        row[CAPACITY], row[TABLE_SIZE], row[GRAM_TABLE_SIZE] = capacity, table_size, gram_table_size
        row[SEED] = self.seed

    def _grow(self, slot: int, target: int) -> None:
        row = self.slots[slot]
        capacity, table_size, gram_table_size = (int(row[i]) for i in (CAPACITY, TABLE_SIZE, GRAM_TABLE_SIZE))
        if target > capacity:
            capacity = target + max(_MIN_SPARE, target >> 7)
            table_size = max(table_size, (target - int(row[LENGTH])) >> 2)  # text repeats at least that much
        else:
            # The rest of a text may repeat itself as little as what has been read.
            distinct = int(row[DISTINCT]) * target // max(1, int(row[LENGTH]))
            table_size = max(table_size + (table_size >> 2), 8 * min(distinct, target) // 7 + 1)
        if capacity >> 5 > gram_table_size:  # chains would become long
            gram_table_size = capacity >> 4
        self._allocate(slot, capacity, table_size, gram_table_size)
