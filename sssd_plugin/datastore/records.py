"""`Record`: a document that was learnt; `Erasure`: which to forget; `PendingRecords`: those still to be written."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from sssd_plugin.datastore.fleet.replica import Fetched

T = TypeVar("T")

_MAX_PENDING = 4 << 20  # tokens


@dataclass(frozen=True, slots=True)
class Record:
    """A document.

    Attributes:
        tenant: 16 bytes, or none.
        milliseconds: since 1970, when its request ended.
        tokens: int32 [n].
    """

    tenant: bytes
    milliseconds: int
    tokens: NDArray[np.int32]

    @property
    def size(self) -> int:
        """Tokens, the separator included."""
        return len(self.tokens) + 1


@dataclass(frozen=True, slots=True)
class Erasure:
    """What is to be forgotten.

    Attributes:
        tenant: whose documents; None for everybody's.
        before: those from before this time, in ms since 1970; None for all that there are.
    """

    tenant: bytes | None = None
    before: int | None = None

    def covers(self, tenant: bytes, milliseconds: int) -> bool:
        return (self.tenant is None or self.tenant == tenant) and (self.before is None or milliseconds < self.before)


def keep_shares(held: Mapping[T, int], total: int) -> dict[T, int]:
    """Return what each holder may keep of what it holds, `total` together: those above an equal share are cut to one
    size, and nobody below it loses anything."""
    left, kept = total, {}
    for number, (holder, size) in enumerate(sorted(held.items(), key=lambda item: item[1])):
        kept[holder] = min(size, left // (len(held) - number))
        left -= kept[holder]
    return kept


class Changes(NamedTuple):
    """What others have done since the last time.

    Attributes:
        erasures, records: what they erased, and what they then learnt.
        fetched: what a fleet has learnt (`sssd_plugin.datastore.fleet.replica.Fetched`); None where it is as before.
    """

    erasures: list[Erasure]
    records: list[Record]
    fetched: Fetched | None = None


class PendingRecords:
    """Documents that wait to be written, in memory, while the disk or the bucket refuses. Thread-safe.

    Attributes:
        dropped: documents that were never written, because it refused for long.
    """

    def __init__(self) -> None:
        self.dropped = 0
        self._records: deque[Record] = deque()
        self._tokens = 0
        self._lock = threading.Lock()

    def append(self, record: Record) -> None:
        with self._lock:
            self._records.append(record)
            self._tokens += record.size
            while self._tokens > _MAX_PENDING and len(self._records) > 1:
                self._tokens -= self._records.popleft().size
                self.dropped += 1

    def take(self) -> list[Record]:
        """Remove and return all."""
        with self._lock:
            records = list(self._records)
            self._set([])
            return records

    def give_back(self, records: list[Record]) -> None:
        """Put what could not be written before the others."""
        with self._lock:
            self._set([*records, *self._records])

    def erase(self, erasure: Erasure) -> None:
        """Never write what the erasure covers."""
        with self._lock:
            self._set(r for r in self._records if not erasure.covers(r.tenant, r.milliseconds))

    def _set(self, records: Iterable[Record]) -> None:
        self._records = deque(records)
        self._tokens = sum(record.size for record in self._records)


def in_parts(records: Iterable[Record], limit: int, isolated: bool = False) -> Iterator[list[Record]]:
    """Yield consecutive documents of at most `limit` tokens together, separators included, unless one alone is larger.

    Args:
        isolated: cut between tenants where that is possible.
    """
    part: list[Record] = []
    size = begin = tenant_size = 0  # of the part; where its last tenant begins, and that one's size
    for record in records:
        if not part or (isolated and record.tenant != part[-1].tenant):
            begin, tenant_size = len(part), 0
        if part and size + record.size > limit:
            cut = begin or len(part)
            yield part[:cut]
            part, size = part[cut:], tenant_size if begin else 0
            tenant_size, begin = size, 0
        part.append(record)
        size, tenant_size = size + record.size, tenant_size + record.size
    if part:
        yield part


def now_ms() -> int:
    """Milliseconds since 1970."""
    return time.time_ns() // 1_000_000
