"""`Groups`: the newest answers to each prompt, as clients group their requests, in memory."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque

import numpy as np
from numpy.typing import NDArray

from sssd_plugin.datastore.records import Erasure, Record

MOST_OF_ONE = 1 << 14  # tokens of a group: a request indexes so many before its first draft
MOST, MOST_GROUPS = 1 << 22, 1 << 16  # tokens of all groups; their number


class Groups:
    """Learnt documents by tenant and group. The oldest of a group go first, and groups that were used least recently.
    Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: OrderedDict[tuple[int, str], deque[Record]] = OrderedDict()
        self._tokens = 0

    def add(self, group: str, record: Record) -> None:
        with self._lock:
            documents = self._held.setdefault((record.tenant, group), deque())
            self._held.move_to_end((record.tenant, group))
            documents.append(record)
            self._tokens += record.size
            while sum(document.size for document in documents) > MOST_OF_ONE:
                self._tokens -= documents.popleft().size
            while self._tokens > MOST or len(self._held) > MOST_GROUPS:
                self._tokens -= sum(document.size for document in self._held.popitem(last=False)[1])

    def answers(self, tenant: int, group: str) -> list[NDArray[np.int32]]:
        """The documents of a group, int32 [n] each, newest last."""
        with self._lock:
            if (tenant, group) in self._held:
                self._held.move_to_end((tenant, group))
            return [document.tokens for document in self._held.get((tenant, group), ())]

    def erase(self, erasure: Erasure) -> None:
        with self._lock:
            for key, documents in list(self._held.items()):
                left = deque(document for document in documents if not erasure.covers(document))
                self._tokens -= sum(document.size for document in documents) - sum(document.size for document in left)
                self._held[key] = left
                if not left:
                    del self._held[key]
