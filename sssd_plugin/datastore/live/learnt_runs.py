"""`LearntRuns`: what is learnt from each tenant, in memory: runs that are merged in the background, and their views.

A log-structured merge: a finished document is merged at once into the tenant's memtable, a small newest run; full runs
are merged into larger ones by one background thread. Runs are immutable, a step's `View` is a table of their addresses,
and a change is a new view, so a step sees one state for its whole batch.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from sssd_plugin.datastore.index.runs import Run, Searched, View, sorted_run, with_document, without
from sssd_plugin.datastore.index.sub_index import Snapshot
from sssd_plugin.datastore.live.merging import Merge, MergeThread
from sssd_plugin.datastore.live.tenants import Tenant, kept, writer_of
from sssd_plugin.datastore.records import Erasure, Record, in_parts, keep_shares

if TYPE_CHECKING:
    from sssd_plugin.datastore.fleet.replica import Fetched

logger = logging.getLogger("freedraft.datastore")

SEARCHED = 8
"""Sub-indices that are searched at most, static ones included (arXiv 2411.05894, 3.1.3)."""
MIN_RUNS = 2
"""That a tenant may have, however many others are searched."""
MEMTABLE_TOKENS = 1 << 12
"""Size at which the memtable is left as it is: merging a document into it costs a pass over it."""
LARGE_TOKENS = 1 << 12
"""Larger documents are sorted in the background, so that they do not hold up the engine."""
_MAX_WAITING = 1 << 20  # tokens of large documents
_MANY_TENANTS = 4096
_TENANT_SECONDS = 3600.0


class LearntRuns:
    """The runs of all tenants.

    Args:
        vocab_size: token ids are below it.
        static: what every tenant drafts from besides.
        isolated: whether requests of different tenants see different views.
        max_tokens: held at most, separators included.

    Attributes:
        lock: to be held where a method says so.
        tenants: by number; 0 is that of requests of none.
        n: tokens held, separators included; inserted, taken: tokens and documents that were taken;
            evicted: tokens that were dropped to make room.
    """

    def __init__(self, vocab_size: int, static: Snapshot, *, isolated: bool, max_tokens: int) -> None:
        self.vocab_size, self.isolated, self.max_tokens = vocab_size, isolated, max_tokens
        self.lock = threading.Lock()
        self.merger = MergeThread(vocab_size, self._on_merged, self._learn_large)
        self.n = self.inserted = self.taken = self.evicted = 0
        self._documents = 0
        self._waiting: deque[Record] = deque()  # large documents
        self._fetched: Fetched | None = None
        self._oldest = 0
        self._set_static(static)
        self.tenants = {0: Tenant(b"", self._static_view)}
        self._next_tenant = 1
        self._numbers: dict[bytes, int] = {b"": 0}
        self._joined: tuple[tuple[View, ...], View] | None = None

    def learns(self, tenant: int) -> bool:
        """Return whether requests of this tenant teach and learn: those of none do not where tenants are kept apart."""
        return tenant > 0 or not self.isolated

    def erase(self, erasure: Erasure) -> None:
        """Forget documents: no view made after this has them. Other tenants' requests go on meanwhile."""
        with self.lock:
            waiting, self._waiting = self._waiting, deque()
            for record in waiting:
                if erasure.covers(record.tenant, record.milliseconds):
                    self.n -= record.size
                else:
                    self._waiting.append(record)
            ended = erasure, self._documents
            of_one = self.isolated and erasure.tenant is not None
            numbers = [self._numbers.get(erasure.tenant or b"", -1)] if of_one else list(self.tenants)
        for number in numbers:
            with self.lock:
                self._joined = None
                if number in self.tenants:
                    self._erase(self.tenants[number], ended)

    def _erase(self, tenant: Tenant, ended: tuple[Erasure, int]) -> None:
        """With the lock held."""
        if not tenant.all_runs:
            return
        if tenant.memtable and not (keep := kept(tenant.memtable, [ended])).all():
            self.n -= tenant.memtable.n
            tenant.memtable = without(tenant.memtable, self.vocab_size, keep)
            self.n += tenant.memtable.n if tenant.memtable else 0
        tenant.erasures.append(ended)
        if self.merger.failed:  # nobody rewrites runs any more
            self.n -= tenant.n
            tenant.runs = [run for run in tenant.runs if kept(run, tenant.erasures).all()]
            self.n += tenant.n
        self._plan(tenant)
        tenant.view = self._view_of(tenant)

    def view(self, tenants: NDArray[np.int64] | None = None) -> tuple[View, NDArray[np.int64] | None]:
        """Return what a batch drafts from. A tenant that is not known any more sees the static store only.

        Args:
            tenants: int64 [B], the tenant of each request; None if all are of none.

        Returns:
            The view, and the group of each request (int64 [B]), or None where all are in group 0.
        """
        if tenants is None or not len(tenants) or not self.isolated:
            return self.tenants[0].view, None
        if (tenants == tenants[0]).all():
            return self._view_for(int(tenants[0])), None
        numbers, groups = np.unique(tenants, return_inverse=True)
        views = tuple(map(self._view_for, numbers.tolist()))
        if self._joined is None or self._joined[0] != views:
            self._joined = views, View.join(views)
        return self._joined[1], groups.astype(np.int64)

    def use_static(self, static: Snapshot) -> None:
        """Replace what every tenant drafts from besides."""
        with self.lock:
            self._set_static(static)
        self._refresh()

    def use_fetched(self, fetched: Fetched) -> None:
        """Draft from what a fleet has learnt, and not from what of it is held here."""
        with self.lock:
            self._fetched = fetched
            self._set_static(self._given)
        self._refresh()
        self.erase(Erasure(None, fetched.until))

    def hide_older(self, before: int) -> None:
        """Draft from no section of a fleet that holds a document from before this time (ms)."""
        self._oldest = before
        if self._fetched is not None:
            self._refresh()

    def _refresh(self) -> None:
        for number in list(self.tenants):
            with self.lock:
                if tenant := self.tenants.get(number):
                    self._set_sections(tenant)

    def settle(self, timeout: float = 60.0) -> bool:
        """Wait until the background has nothing to do; return whether it has not."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            with self.lock:
                if not self._waiting and not any(tenant.busy for tenant in self.tenants.values()):
                    return True
            time.sleep(0.001)
        return False

    def load(self, records: Iterable[Record]) -> None:
        """Take over what was on disk."""
        started = time.perf_counter()
        owned: dict[bytes, list[Record]] = {}
        total = skipped = 0
        for record in records:
            if len(record.tokens) and int(record.tokens.max()) >= self.vocab_size:
                skipped += 1
            elif record.tenant or not self.isolated:
                owned.setdefault(record.tenant if self.isolated else b"", []).append(record)
                total += record.size
        with self.lock:
            for digest, documents in owned.items():
                tenant = self.tenants[self.number(digest)]
                for part in in_parts(documents, self.max_tokens // 2):
                    texts = [record.tokens for record in part]
                    tenant.runs.append(sorted_run(texts, self.vocab_size, self._about(part)))
                tenant.view = self._view_of(tenant)
            self.n += total
            self._drop()
        if skipped:
            logger.warning("freedraft: %d documents on disk hold ids beyond the vocabulary; left out", skipped)
        if total:
            seconds = time.perf_counter() - started
            logger.info("freedraft: %d live tokens of %d tenants ready in %.2f s", total, len(owned), seconds)

    def reason_against(self, tokens: NDArray[np.int32], tenant: int) -> str:
        """Return why a document cannot be taken, in a word; nothing if it can. With the lock held."""
        if not self.learns(tenant) or tenant not in self.tenants:
            return "tenant"
        if len(tokens) >= self.max_tokens // 16:
            return "size"
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab_size:
            return "vocabulary"
        if self.merger.failed:
            return "failure"
        waiting = len(tokens) > LARGE_TOKENS and sum(record.size for record in self._waiting) > _MAX_WAITING
        return "room" if waiting or self.n + len(tokens) + 1 > self.max_tokens else ""

    def take(self, record: Record) -> None:
        """Take a document. With the lock held."""
        self.n += record.size
        self.inserted += record.size - 1
        self.taken += 1
        if record.size > LARGE_TOKENS:
            self._waiting.append(record)
            self.merger.submit(None)
        else:
            owner = self._owner(record)
            owner.memtable = with_document(owner.memtable, record.tokens, self.vocab_size, self._about([record]))
            # At most as many runs as may be searched, however slowly the background merges them.
            if owner.memtable.n >= MEMTABLE_TOKENS and len(owner.runs) + 1 < self._max_runs(owner):
                owner.runs.append(owner.memtable)
                owner.memtable = None
                self._plan(owner)
            owner.view = self._view_of(owner)
        self._drop()

    def number(self, digest: bytes) -> int:
        """Return the number of a tenant. With the lock held."""
        number = self._numbers.get(digest)
        if number is None:
            self._prune()
            number = self._numbers[digest] = self._next_tenant
            self._next_tenant += 1
            tenant = self.tenants[number] = Tenant(digest, self._static_view)
            self._set_sections(tenant)
        self.tenants[number].asked_for = time.monotonic()
        return number

    # Below: with the lock held, except `_on_merged` and `_learn_large`.

    def _max_runs(self, tenant: Tenant) -> int:
        """Runs that a tenant may have."""
        return max(MIN_RUNS, SEARCHED - len(self._static.table) - len(tenant.sections))

    def _set_sections(self, tenant: Tenant) -> None:
        if self._fetched is not None and (tenant.digest or not self.isolated):
            digest = tenant.digest if self.isolated else b""
            max_sections = SEARCHED - MIN_RUNS - len(self._static.table)
            tenant.sections = self._fetched.sections(digest, max_sections, self._oldest)
        tenant.view = self._view_of(tenant)

    def _set_static(self, static: Snapshot) -> None:
        self._given = static
        subs = static.sub_indices + (self._fetched.built.sub_indices if self._fetched else ())
        static = Snapshot(subs)
        max_static = SEARCHED - MIN_RUNS - (self._fetched is not None)
        if len(subs) > max_static:
            logger.warning(
                "freedraft: the datastore has %d sub-indices; with what is learnt, at most %d are searched, so the "
                "smallest %d are left out: make fewer of them with `freedraft datastore merge`",
                len(subs),
                SEARCHED,
                len(subs) - max_static,
            )
            largest = sorted(sorted(range(len(subs)), key=lambda i: -subs[i].n)[:max_static])
            static = Snapshot([subs[i] for i in largest])
        self._static = static
        self._static_view = View.of(static)

    def _learn_large(self) -> None:
        """Take the oldest large document, unless it was erased meanwhile."""
        with self.lock:
            if not self._waiting:
                return
            record = self._waiting[0]
            about = self._about([record])
        run = sorted_run([record.tokens], self.vocab_size, about)
        with self.lock:
            if not self._waiting or self._waiting[0] is not record:
                return
            owner = self._owner(record)
            full = len(owner.runs) + 1 >= self._max_runs(owner)
            if full and owner.busy:  # again behind the merge that makes room
                self.merger.submit(None)
                return
            self._waiting.popleft()
            if full:
                self._start(owner, owner.runs[-1:], more=run)
                return
            owner.runs.append(run)
            self._plan(owner)
            owner.view = self._view_of(owner)

    def _about(self, records: list[Record]) -> NDArray[np.int64]:
        """Number documents and return their rows of `Run.documents`."""
        first, self._documents = self._documents, self._documents + len(records)
        return np.array([(r.milliseconds, writer_of(r.tenant), first + i) for i, r in enumerate(records)], np.int64)

    def _owner(self, record: Record) -> Tenant:
        """Return who sees a document."""
        return self.tenants[self.number(record.tenant) if self.isolated else 0]

    def _view_for(self, number: int) -> View:
        tenant = self.tenants.get(number)
        return self._static_view if tenant is None else tenant.view

    def _view_of(self, tenant: Tenant) -> View:
        runs: list[Searched] = [*tenant.sections, *tenant.visible_runs]
        return View.of(self._static, runs) if runs else self._static_view

    def _plan(self, tenant: Tenant) -> None:
        """Start a merge if the tenant's runs want one."""
        inputs = tenant.runs_to_replace(self._max_runs(tenant), self.max_tokens // 2)
        if inputs:
            self._start(tenant, inputs)

    def _drop(self) -> None:
        """Drop documents beyond the bound, of who holds more than an equal share, the oldest first: whole runs at once,
        part of a run in the background."""
        if self.n <= self.max_tokens - self.max_tokens // 16:
            return
        held = {number: tenant.n for number, tenant in self.tenants.items() if tenant.all_runs}
        for number, share in keep_shares(held, self.max_tokens - self.max_tokens // 8).items():
            tenant, excess = self.tenants[number], held[number] - share
            if excess <= 0 or tenant.busy:
                continue
            if tenant.memtable and not tenant.runs:
                tenant.runs, tenant.memtable = [tenant.memtable], None
            while tenant.runs and tenant.runs[0].n <= excess:
                oldest = tenant.runs.pop(0)
                excess -= oldest.n
                self.n -= oldest.n
                self.evicted += oldest.n
                self.merger.release([oldest])
            if excess > 0 and tenant.runs:
                self._start(tenant, tenant.runs[:1], excess)
            tenant.view = self._view_of(tenant)

    def _prune(self) -> None:
        """Forget tenants of whom nothing is held. Numbers are not used again: an old request may still have one."""
        if len(self.tenants) % _MANY_TENANTS:
            return
        now = time.monotonic()
        for number, tenant in list(self.tenants.items()):
            if number and not tenant.busy and not tenant.all_runs and now - tenant.asked_for > _TENANT_SECONDS:
                del self.tenants[number], self._numbers[tenant.digest]

    def _start(self, tenant: Tenant, inputs: list[Run], excess: int = 0, more: Run | None = None) -> None:
        tenant.busy = True
        self.merger.submit(Merge(tenant, inputs, excess, more))

    def _on_merged(self, merge: Merge) -> None:
        tenant, result = merge.owner, merge.result
        with self.lock:
            at = next(i for i, run in enumerate(tenant.runs) if run is merge.inputs[0])
            tenant.runs[at : at + len(merge.inputs)] = [result] if result else []
            gone = [*merge.inputs, merge.more] if merge.more else merge.inputs
            change = (result.n if result else 0) - sum(run.n for run in gone)
            self.n += change
            if merge.excess:
                self.evicted -= change
            tenant.busy = False
            self._plan(tenant)
            self._drop()
            tenant.view = self._view_of(tenant)
        self.merger.release(merge.inputs)
