"""`Record`: a learnt document; `Erasure`: documents to forget; `PendingRecords`: documents still to be written."""

import threading
import time
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from sssd_plugin.datastore.index.sub_index import Snapshot

T = TypeVar("T")

FOREVER = 1 << 62  # ms since 1970
_MAX_PENDING = 4 << 20  # tokens


@dataclass(frozen=True, slots=True)
class Record:
    tenant: int  # `tenant_number`, 0 without one
    milliseconds: int  # since 1970, when its request ended
    tokens: NDArray[np.int32]

    @property
    def size(self) -> int:
        """Tokens, the separator included."""
        return len(self.tokens) + 1


@dataclass(frozen=True, slots=True)
class Erasure:
    """Documents to forget: of one tenant (None: of all), before a time in ms since 1970."""

    tenant: int | None = None
    before: int = FOREVER

    def covers(self, record: Record) -> bool:
        return self.tenant in (None, record.tenant) and record.milliseconds < self.before


@dataclass(slots=True)
class Changes:
    """Erasures and then documents of other processes; a built store once available."""

    erasures: list[Erasure] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    built: Snapshot = ()


@dataclass(slots=True)
class LiveStats:
    tokens: int = 0  # held, separators included
    max_sub_indices: int = 0  # runs of one tenant
    nbytes: int = 0  # memory of all runs
    tenants: int = 0  # known tenants
    documents: int = 0  # taken since the start
    inserted: int = 0  # their tokens
    merges: int = 0  # in the background
    merge_seconds: float = 0.0
    evicted: int = 0  # tokens dropped to make room
    dropped: Counter[str] = field(default_factory=Counter)  # refused documents, by reason


class PendingRecords:
    """Documents waiting in memory while the disk or the bucket fails. Thread-safe."""

    def __init__(self) -> None:
        self.dropped = 0  # documents never written, after a long failure
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
        with self._lock:
            records = list(self._records)
            self._set([])
            return records

    def give_back(self, records: list[Record]) -> None:
        with self._lock:
            self._set([*records, *self._records])

    def erase(self, erasure: Erasure) -> None:
        with self._lock:
            self._set([record for record in self._records if not erasure.covers(record)])

    def _set(self, records: list[Record]) -> None:
        self._records = deque(records)
        self._tokens = sum(record.size for record in records)


def keep_shares(held: Mapping[T, int], total: int) -> dict[T, int]:
    """Cap the holders' sizes so that they fit into `total`: holders above an equal share are cut to one size, others
    lose nothing."""
    left, kept = total, {}
    for number, (holder, size) in enumerate(sorted(held.items(), key=lambda item: item[1])):
        kept[holder] = min(size, left // (len(held) - number))
        left -= kept[holder]
    return kept


def now_ms() -> int:
    return time.time_ns() // 1_000_000
