"""`Tenant`: the runs of one tenant, and their next rewrite."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from sssd_plugin.datastore.index.runs import Run, View
from sssd_plugin.datastore.records import Erasure

FACTOR = 4
"""A run is merged with its newer neighbour unless it is at least FACTOR times as large."""
Erasures = list[tuple[Erasure, int]]
"""Each with the number of the first document after it."""


@dataclass(slots=True, eq=False)
class Tenant:
    """Text learnt from one tenant's requests, or from all if tenants are not kept apart."""

    runs: list[Run] = field(default_factory=list)  # oldest and largest first
    memtable: Run | None = None  # run of the newest documents, to merge the next one into
    waiting: int = 0  # runs that wait to be sorted
    erasures: Erasures = field(default_factory=list)  # of documents in `runs` or waiting
    tidying: bool = False  # a background task for `runs` is queued
    view: View | None = None  # view of its requests; None after a change

    @property
    def all_runs(self) -> list[Run]:
        memtable = self.memtable  # first: other threads read without a lock
        return [*self.runs, memtable] if memtable else [*self.runs]

    @property
    def visible_runs(self) -> list[Run]:
        """Runs without erased documents, the only ones to draft from."""
        return [run for run in self.all_runs if kept(run, self.erasures).all()] if self.erasures else self.all_runs

    @property
    def n(self) -> int:  # tokens, separators included
        return sum(run.n for run in self.all_runs)

    @property
    def taught_at(self) -> int:
        """When its newest document was learnt, ms since 1970; 0 without documents."""
        return max((int(run.documents[-1, 0]) for run in self.all_runs), default=0)

    def runs_to_replace(self, max_runs: int, max_tokens: int) -> list[Run]:
        """Return a run with erased documents, or two neighbours to merge; empty if there is nothing to do.

        Args:
            max_runs: bound, the memtable included. Once reached, the smallest neighbours are merged regardless of
                sizes.
            max_tokens: of the merged run.
        """
        runs = self.runs
        for run in runs if self.erasures else ():
            if not kept(run, self.erasures).all():
                return [run]
        if not self.waiting:
            self.erasures.clear()
        pairs, sizes = range(len(runs) - 1), [run.n for run in runs]
        close = [i for i in pairs if sizes[i] < FACTOR * sizes[i + 1] and sizes[i] + sizes[i + 1] <= max_tokens]
        if pairs and not close and len(runs) + 1 >= max_runs:
            close = [min(pairs, key=lambda i: sizes[i] + sizes[i + 1])]
        return runs[close[-1] : close[-1] + 2] if close else []


def kept(run: Run, erasures: Erasures) -> NDArray[np.bool_]:
    """Return bool [d]: which documents of a run are not erased."""
    times, tenants, numbers = run.documents.T
    keep = np.ones(len(times), bool)
    for erasure, spared in erasures:
        covered = (numbers < spared) & (times < erasure.before)
        if erasure.tenant is not None:
            covered &= tenants == erasure.tenant
        keep &= ~covered
    return keep
