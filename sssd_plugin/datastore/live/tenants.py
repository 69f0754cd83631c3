"""`Tenant`: the runs of one tenant, and which of them are merged next."""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sssd_plugin.datastore.disk.sections import Section
from sssd_plugin.datastore.index.runs import Run, View
from sssd_plugin.datastore.records import Erasure

FACTOR = 4
"""An older run is merged with newer ones that are together more than a FACTOR-th of it."""


@dataclass(slots=True, eq=False)
class Tenant:
    """What is learnt from one tenant's requests, or from everybody's where tenants are not kept apart.

    Attributes:
        digest: `tenant_digest` of the name; empty for requests of none.
        runs: oldest first.
        sections: what a fleet has learnt from it.
        memtable: the newest documents, which the next one is merged into.
        busy: some of `runs` are being replaced.
        erasures: of documents in `runs`, and the number of the first document that each spares; the runs that hold what
            is to be erased are not drafted from.
        asked_for: when a request last named the tenant, in seconds of the monotonic clock.
        view: what the tenant's requests draft from.
    """

    digest: bytes
    view: View
    runs: list[Run] = field(default_factory=list)
    sections: list[Section] = field(default_factory=list)
    memtable: Run | None = None
    busy: bool = False
    erasures: list[tuple[Erasure, int]] = field(default_factory=list)
    asked_for: float = field(default_factory=time.monotonic)

    @property
    def all_runs(self) -> list[Run]:
        return [*self.runs, self.memtable] if self.memtable else self.runs

    @property
    def visible_runs(self) -> list[Run]:
        """Those without a document that is to be erased."""
        return [run for run in self.all_runs if kept(run, self.erasures).all()] if self.erasures else self.all_runs

    @property
    def n(self) -> int:
        """Tokens held, separators included."""
        return sum(run.n for run in self.all_runs)

    def runs_to_replace(self, max_runs: int, max_tokens: int) -> list[Run]:
        """Return a run with documents to erase, or consecutive runs that should be one; none if all is well.

        Args:
            max_runs: that the tenant may have, the memtable included. Where they are reached, the smallest pair is
                merged, whatever the sizes.
            max_tokens: of the merged run.
        """
        runs = self.runs
        if self.busy:
            return []
        for run in runs if self.erasures else ():
            if not kept(run, self.erasures).all():
                return [run]
        self.erasures.clear()
        if len(runs) < 2:
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


def writer_of(digest: bytes) -> int:
    """Return what stands for a digest in `Run.documents`."""
    return int.from_bytes(digest[:8], "little", signed=True)


def kept(run: Run, erasures: list[tuple[Erasure, int]]) -> NDArray[np.bool_]:
    """Return which documents of a run stay, given erasures and the first document that each spares: bool [d]."""
    times, writers, numbers = run.documents.T
    keep = np.ones(len(times), bool)
    for erasure, spared in erasures:
        covered = numbers < spared
        if erasure.before is not None:
            covered &= times < erasure.before
        if erasure.tenant is not None:
            covered &= writers == writer_of(erasure.tenant)
        keep &= ~covered
    return keep
