"""`Tenant`: the runs of one tenant, and which of them are merged next."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field

from sssd_plugin.datastore.index.runs import Run, View

FACTOR = 4
"""An older run is merged with newer ones that are together more than a FACTOR-th of it."""


@dataclass(slots=True, eq=False)
class Tenant:
    """What is learnt from one tenant's requests, or from everybody's where tenants are not kept apart.

    Attributes:
        digest: `tenant_digest` of the name; empty for requests of none.
        runs: oldest first.
        memtable: the newest documents, which the next one is merged into.
        busy: some of `runs` are being merged.
        asked_for: when a request last named the tenant, in seconds of the monotonic clock.
        view: what the tenant's requests draft from.
    """

    digest: bytes
    view: View
    runs: list[Run] = field(default_factory=list)
    memtable: Run | None = None
    busy: bool = False
    asked_for: float = field(default_factory=time.monotonic)

    @property
    def all_runs(self) -> list[Run]:
        return [*self.runs, self.memtable] if self.memtable else self.runs

    def runs_to_merge(self, max_runs: int, max_tokens: int) -> list[Run]:
        """Return consecutive runs that should be one; none if all is well.

        Args:
            max_runs: that the tenant may have, the memtable included. Where they are reached, the smallest pair is
                merged, whatever the sizes.
            max_tokens: of the merged run.
        """
        runs = self.runs
        if self.busy or len(runs) < 2:
            return []
        begin, total = len(runs) - 1, runs[-1].n
        while begin > 0 and runs[begin - 1].n < FACTOR * total and total + runs[begin - 1].n <= max_tokens:
            begin -= 1
            total += runs[begin].n
        if begin < len(runs) - 1:
            return runs[begin:]
        if len(runs) + 1 < max_runs:
            return []
        pair = min(range(len(runs) - 1), key=lambda i: runs[i].n + runs[i + 1].n)
        return runs[pair : pair + 2]


def tenant_digest(key: bytes, name: str) -> bytes:
    """Return what stands for a tenant's name in memory and on disk: 16 bytes that hide it from who lacks the key."""
    return hashlib.blake2b(name.encode("utf-8", "surrogatepass"), digest_size=16, key=key).digest()
