"""`RequestIndex`: the tokens of each request, and earlier positions of each token and 4-gram.

Two hash chains run over the token array itself. `heads` maps a token to its newest position, and `previous[i]` links
position i to the next older position of the same token; `gram_heads` and `gram_previous` do the same for the last four
tokens at a position, so that a copy from a long context is found even if its single tokens are common. A token takes 12
bytes plus its share of the tables; a trie of n-grams (arXiv 2411.05894, A.1) takes hundreds.

The hash functions are seeded, so that clients cannot choose tokens that collide.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from freedraft.compiled import compiled, lean
from sssd_plugin.pointers import array_at

# Columns of the slot table: address of a request's memory; tokens held, and capacity; sizes of both hash tables;
# tokens in them, distinct ones among these; seed of the hash functions.
ADDRESS, LENGTH, CAPACITY, TABLE_SIZE, GRAM_TABLE_SIZE, INDEXED, DISTINCT, SEED = range(8)
_SIZES = [CAPACITY, TABLE_SIZE, GRAM_TABLE_SIZE]

GRAM = 4  # tokens that `gram_heads` hashes
OUTSIDE = -2  # at and below it are ids that replace images: in no store and no draft

_SMALLEST = 64, 64, 16  # by _SIZES
_MIN_SPARE = 64  # tokens of capacity beyond the present length


class Request(NamedTuple):
    """The index of one request, as compiled code reads it."""

    tokens: NDArray[np.int32]  # [n], the prompt and the output so far
    previous: NDArray[np.int32]  # [n], the next older position of the same token, -1 for none
    heads: NDArray[np.int32]  # [T], open addressing: the newest position of each token, -1 in empty entries
    counts: NDArray[np.uint16]  # [T], how often the token of each entry occurs, at most 65535
    # [n], the next older position with the same hash of the last four tokens, -1 for none; not set at the first three.
    gram_previous: NDArray[np.int32]
    gram_heads: NDArray[np.int32]  # [G], the newest position by hash of its last four tokens, -1 for none
    seed: np.int64


@lean
def _layout(capacity, size, gram_size):
    """Return where in a request's memory `previous`, `gram_previous`, `heads`, `gram_heads` and `counts` start, behind
    `tokens`, and where it ends, in bytes."""
    heads = 12 * capacity
    gram_heads = heads + 4 * size
    counts = gram_heads + 4 * gram_size
    return 4 * capacity, 8 * capacity, heads, gram_heads, counts, counts + 2 * size


@lean
def _request(slots, s, n):
    at, size, gram_size = slots[s, ADDRESS], slots[s, TABLE_SIZE], slots[s, GRAM_TABLE_SIZE]
    previous, gram_previous, heads, gram_heads, counts, _ = _layout(slots[s, CAPACITY], size, gram_size)
    return Request(
        array_at(at, (n,), np.int32), array_at(at + previous, (n,), np.int32), array_at(at + heads, (size,), np.int32),
        array_at(at + counts, (size,), np.uint16), array_at(at + gram_previous, (n,), np.int32),
        array_at(at + gram_heads, (gram_size,), np.int32), slots[s, SEED],
    )  # fmt: skip


@lean
def request_at(slots, s):
    return _request(slots, s, slots[s, LENGTH])


@lean
def mix(x):
    """Return a 64-bit hash of x (uint64) in which every bit depends on all of x (splitmix64, Steele et al. 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@lean
def _upper_mix(x):
    return mix(x) >> np.uint64(32)


@lean
def find(request, token):
    """Return the entry of `token` in the hash table `heads`, or the empty entry where it belongs."""
    heads, tokens = request.heads, request.tokens
    size = len(heads)
    i = np.int64((_upper_mix(np.uint64(token) + np.uint64(request.seed)) * np.uint64(size)) >> np.uint64(32))
    while heads[i] >= 0 and tokens[heads[i]] != token:
        i = np.int64(i + 1 if i + 1 < size else 0)
    return i


@lean
def find_gram(request, a, b, c, d):
    """Return the entry of `gram_heads` for the four tokens a, b, c, d, in the order of the text."""
    one = (np.uint64(a) << np.uint64(32)) | np.uint64(b)
    two = (np.uint64(c) << np.uint64(32)) | np.uint64(d)
    mixed = _upper_mix((_upper_mix(one + np.uint64(request.seed)) << np.uint64(32)) ^ two ^ np.uint64(request.seed))
    return np.int64((mixed * np.uint64(len(request.gram_heads))) >> np.uint64(32))


@lean
def _older_gram(request, i, before, a, b, c, d):
    """Return the first position in the chain from i on, below `before`, that ends with a, b, c, d; -1 for none."""
    tokens = request.tokens
    while i >= 0 and not (
        i < before and tokens[i] == d and tokens[i - 1] == c and tokens[i - 2] == b and tokens[i - 3] == a
    ):
        i = request.gram_previous[i]
    return np.int64(i)


@lean
def newest_gram(request, before, a, b, c, d):
    """Return the newest position below `before` that ends with the tokens a, b, c, d, -1 for none. Hash collisions are
    skipped: drafts must not depend on the seed, which differs between tensor-parallel ranks."""
    return _older_gram(request, request.gram_heads[find_gram(request, a, b, c, d)], before, a, b, c, d)


@lean
def older_gram(request, i):
    """Return the newest position below i that ends with the same four tokens as i, -1 for none."""
    tokens = request.tokens
    return _older_gram(request, request.gram_previous[i], i, tokens[i - 3], tokens[i - 2], tokens[i - 1], tokens[i])


@lean
def _link_gram(request, i):
    tokens = request.tokens
    if i >= GRAM - 1:
        entry = find_gram(request, tokens[i - 3], tokens[i - 2], tokens[i - 1], tokens[i])
        request.gram_previous[i] = request.gram_heads[entry]
        request.gram_heads[entry] = i


@lean
def ingest(slots, s, new, shift, target, stop):
    """Append until the request has `target` tokens, position i being `new[i + shift]`, and index those below `stop`.
    False if the slot must grow and the call be repeated."""
    if target > slots[s, CAPACITY]:
        return False
    n, distinct = slots[s, INDEXED], slots[s, DISTINCT]
    request = _request(slots, s, slots[s, CAPACITY])
    tokens, previous, heads, counts = request.tokens, request.previous, request.heads, request.counts
    for i in range(slots[s, LENGTH], target):
        tokens[i] = new[i + shift]
    slots[s, LENGTH] = target
    max_distinct, stop = len(heads) - (len(heads) >> 3), min(stop, target)  # past 7/8 full, probing slows down
    while n < stop:
        i = find(request, tokens[n])
        if heads[i] < 0:
            if distinct >= max_distinct:
                break
            distinct += 1
        previous[n] = heads[i]
        heads[i] = n
        if counts[i] < 65535:
            counts[i] += 1
        _link_gram(request, n)
        n += 1
    slots[s, INDEXED], slots[s, DISTINCT] = max(n, slots[s, INDEXED]), distinct
    return n >= stop


@lean
def _update(slots, slot_ids, tokens, spans, stale, resumed):
    """Append like `RequestIndex.update`, from row `resumed` on (-1, or the result of the last call). Writes the number
    of unchanged rows, then these rows, into `stale` (int64 [> B]). Returns the row of a slot that must grow before the
    call is repeated, -1 at the end. spans: starts, ends and contexts."""
    starts, ends, contexts = spans
    if resumed < 0:
        stale[0] = 0
    for b in range(max(resumed, 0), len(slot_ids)):
        s = slot_ids[b]
        if b != resumed and (s < 0 or slots[s, LENGTH] + ends[b] - starts[b] != contexts[b]):
            stale[0] += 1
            stale[stale[0]] = b
        else:
            target = np.int64(contexts[b])
            before = target - (ends[b] - starts[b])  # a request that is behind waits for `RequestIndex.catch_up`
            stop = target if slots[s, INDEXED] >= before else 0
            if not ingest(slots, s, tokens, ends[b] - contexts[b], target, stop):
                return b
    return -1


@compiled(nogil=True)
def _fill(slots, s, old):
    """Copy the contents of slot s to its new memory; old: its former row, int64 [1, C]."""
    n, indexed = slots[s, LENGTH], slots[s, INDEXED]
    request, before = _request(slots, s, n), _request(old, 0, n)
    request.heads[:] = -1
    request.counts[:] = 0
    request.tokens[:] = before.tokens
    request.previous[:indexed] = before.previous[:indexed]
    for k in range(len(before.heads)):
        if before.heads[k] >= 0:
            i = find(request, request.tokens[before.heads[k]])
            request.heads[i] = before.heads[k]
            request.counts[i] = before.counts[k]
    if len(request.gram_heads) == len(before.gram_heads):
        request.gram_heads[:] = before.gram_heads
        request.gram_previous[:indexed] = before.gram_previous[:indexed]
    else:
        request.gram_heads[:] = -1
        for i in range(indexed):
            _link_gram(request, i)


class RequestIndex:
    """The tokens of every live request, addressed by request id. It is not thread-safe: the drafter serialises calls.

    Attributes:
        slots: int64 [S, C], a row per request; compiled code reads it.
        seed: of the hash functions; None: random.
        behind: requests with tokens to index, first come, first served.
    """

    _NOTHING = np.zeros(0, np.int32)

    def __init__(self, max_requests: int = 64, seed: int | None = None) -> None:
        self.seed = secrets.randbits(62) if seed is None else seed
        self.slots = np.zeros((max(1, max_requests), SEED + 1), np.int64)
        self._slot_of: dict[str, int] = {}
        self._free = list(range(len(self.slots) - 1, -1, -1))
        self._memory: dict[int, NDArray[np.uint8]] = {}  # by slot
        self._stale = np.zeros(len(self.slots) + 1, np.int64)
        self.behind: dict[str, None] = {}

    def slot_ids(self, request_ids: Sequence[str]) -> NDArray[np.int64]:
        """Return the slot of each request: int64 [B], -1 where it is unknown."""
        slot_of = self._slot_of
        return np.array([slot_of.get(request_id, -1) for request_id in request_ids], np.int64)

    def update(
        self, slot_ids: NDArray[np.int64], tokens: NDArray[np.int32], starts: NDArray[np.int64],
        ends: NDArray[np.int64], contexts: NDArray[np.int32],
    ) -> list[int]:  # fmt: skip
        """Append tokens to the requests in these slots (int64 [B]) like `Drafter.update`; return the same rows."""
        if len(slot_ids) >= len(self._stale):
            self._stale = np.zeros(2 * len(slot_ids), np.int64)
        spans, b = (starts, ends, contexts), -1
        while (b := _update(self.slots, slot_ids, tokens, spans, self._stale, b)) >= 0:
            self._grow(int(slot_ids[b]), int(contexts[b]))
        return self._stale[1 : self._stale[0] + 1].tolist()

    def replace(self, request_id: str, tokens: NDArray[np.int32], most: int | None = None) -> int:
        """Set the tokens of a request, known or not, and index at most the first `most`, the others in `catch_up`.
        Returns how many were indexed. No draft finds what is not."""
        self.finish([request_id])
        if not self._free:
            old = len(self.slots)
            self.slots = np.concatenate([self.slots, np.zeros_like(self.slots)])
            self._free = list(range(2 * old - 1, old - 1, -1))
        slot = self._slot_of[request_id] = self._free.pop()
        self.slots[slot, SEED] = self.seed
        self._allocate(slot, _SMALLEST)
        return self._ingest(request_id, tokens, len(tokens), len(tokens) if most is None else most)

    def _ingest(self, request_id: str, tokens: NDArray[np.int32], target: int, most: int) -> int:
        slot = self._slot_of[request_id]
        before = int(self.slots[slot, INDEXED])
        while not ingest(self.slots, slot, tokens, 0, target, before + most):
            self._grow(slot, target)
        self.behind[request_id] = None
        if (indexed := int(self.slots[slot, INDEXED])) == target:
            del self.behind[request_id]
        return indexed - before

    def catch_up(self, most: int) -> None:
        """Index at most `most` tokens of those that were put off."""
        for request_id in [*self.behind]:
            if most > 0:
                slot = self._slot_of[request_id]
                most -= self._ingest(request_id, self._NOTHING, int(self.slots[slot, LENGTH]), most)

    def request_ids(self) -> list[str]:
        return list(self._slot_of)

    def tokens(self, request_id: str) -> NDArray[np.int32]:
        """Return the tokens of a request so far: int32 [n], a view that the next update may invalidate; none if it is
        unknown."""
        slot = self._slot_of.get(request_id)
        if slot is None:
            return np.zeros(0, np.int32)
        return self._memory[slot][: 4 * self.slots[slot, LENGTH]].view(np.int32)

    def finish(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            slot = self._slot_of.pop(request_id, None)
            if slot is not None:
                self.slots[slot] = 0
                del self._memory[slot]
                self._free.append(slot)
                self.behind.pop(request_id, None)

    def nbytes(self) -> int:
        return sum(memory.nbytes for memory in self._memory.values())

    def _allocate(self, slot: int, sizes: tuple[int, int, int]) -> None:
        """Allocate memory of these sizes (`_SIZES`) for the slot, and copy its contents."""
        row = self.slots[slot]
        old, memory = row[None].copy(), np.empty(_layout(*sizes)[-1], np.uint8)
        row[ADDRESS], row[_SIZES] = memory.ctypes.data, sizes
        _fill(self.slots, slot, old)
        self._memory[slot] = memory

    def _grow(self, slot: int, target: int) -> None:
        row = self.slots[slot]
        capacity, table_size, gram_table_size = row[_SIZES].tolist()
        if target > capacity:
            capacity = target + max(_MIN_SPARE, target >> 7)
            table_size = max(table_size, (target - int(row[LENGTH])) >> 2)  # text repeats at least that much
        else:
            # The rest of a text may repeat itself as little as what has been read.
            distinct = int(row[DISTINCT]) * target // max(1, int(row[INDEXED]))
            table_size = max(table_size + (table_size >> 2), 8 * min(distinct, target) // 7 + 1)
        if capacity >> 5 > gram_table_size:  # chains would become long
            gram_table_size = capacity >> 4
        self._allocate(slot, (capacity, table_size, gram_table_size))
