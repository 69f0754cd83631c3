"""`LearntRuns`: learnt documents in memory, per tenant, sorted in the background.

A log-structured merge per tenant: a document is merged at once into the memtable, a small newest run; full memtables
become runs, which one background thread merges into larger ones. Runs are immutable; a step's `View` is a table of
their addresses, and every change makes a new view, so a step has one state for its whole batch.
"""

import contextlib
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from sssd_plugin.datastore.disk.format import Isolation
from sssd_plugin.datastore.index.runs import Run, View, merged, sorted_run, warm_up, without
from sssd_plugin.datastore.index.sub_index import Snapshot
from sssd_plugin.datastore.live.tenant import Tenant
from sssd_plugin.datastore.records import FOREVER, Erasure, LiveStats, Record, keep_shares

logger = logging.getLogger("freedraft.datastore")

SEARCHED = 8  # sub-indices at most, static ones included (arXiv 2411.05894, 3.1.3); one more of running answers
MIN_RUNS = 2  # per tenant, regardless of static sub-indices
MEMTABLE_TOKENS = 1 << 12  # capacity of a memtable: merging a document takes a pass over it
LARGE_TOKENS = 1 << 12  # larger documents are sorted in the background, to not delay the engine
NICE = 10  # of the background thread, below the engine's threads
_MANY_TENANTS = 4096
_BULK_TOKENS = 1 << 10  # of a tenant's documents from a log, from which they are sorted together
_MAX_WAITING = 1 << 20  # tokens of large documents


class LearntRuns:
    """Learnt documents, as of `LiveStore`. Thread-safe; `take` needs the lock.

    Attributes:
        tenants: by `tenant_number`; 0: requests without a tenant, or all if tenants are not kept apart.
        held: tokens, separators and those that wait to be sorted included.
        counts: what happened since the start.
        on_erased: called in a background thread after an erasure.
    """

    def __init__(self, vocab_size: int, static: Snapshot, isolation: Isolation, max_tokens: int) -> None:
        self.vocab_size, self.isolation, self.max_tokens = vocab_size, isolation, max_tokens
        self.on_erased: Callable[[], None] = lambda: None
        self.lock = threading.Lock()
        self.tenants = {0: Tenant()}
        self._background = ThreadPoolExecutor(1, "freedraft-live", initializer=_lower_priority)
        self._tasks = 0  # background tasks, queued or running
        self._failed = self._evicting = False
        self._unused: list[Run] = []
        self.held = self._waiting = 0
        self._documents = 0  # number of the next document
        self.counts = LiveStats()
        self._joined: tuple[tuple[View, ...], View] | None = None
        self._statics = {"url": (), "given": static}
        self._choose_static()
        warm_up()

    def erase(self, erasure: Erasure) -> None:
        """Forget documents in memory: no later view has them. Other tenants' requests are not blocked."""
        with self.lock:
            spared = self._documents
            tenants = list(self.tenants.items())
        erased = []
        for number, tenant in tenants:
            if self.isolation == "shared" or erasure.tenant in (None, number):
                with self.lock:
                    self._hide(tenant)  # some of its running answers may have ended
                    if tenant.waiting or not all(kept(run, erasure, spared).all() for run in tenant.all_runs):
                        erased.append(tenant)
                        tenant.hidden += 1
        with self.lock:
            self._joined = None
            self._submit(partial(self._remove, erased, erasure, spared), always=True)
        self.on_erased()

    def learn(self, records: list[Record]) -> None:
        """Insert documents of a log: few one by one, many sorted together in the background."""
        if self._failed:  # nothing is merged or dropped any more
            return
        owned: dict[int, list[Record]] = {}
        for record in records:
            if self._in_vocabulary(record.tokens):
                owned.setdefault(0 if self.isolation == "shared" else record.tenant, []).append(record)
            else:
                self.counts.dropped["vocabulary"] += 1
        if self.isolation == "strict":
            owned.pop(0, None)
        for documents in owned.values():
            ends = np.cumsum([record.size for record in documents])
            parts = ends // (self.max_tokens // 2) if ends[-1] > _BULK_TOKENS else np.arange(len(ends))
            for part in np.split(np.arange(len(ends)), np.flatnonzero(np.diff(parts)) + 1):
                with self.lock:
                    self.take(*(documents[i] for i in part))

    def show(self, number: int, answers: Sequence[NDArray[np.int32]]) -> None:
        """Let requests of a tenant draft from answers that are being written (int32 [n]), in place of the last ones,
        once they are sorted in the background; not if another call or an erasure comes before."""
        with self.lock:
            tenant = self._tenant(0 if self.isolation == "shared" else number)
            if not answers:
                self._hide(tenant)
            else:
                tenant.shows += 1
                self._submit(partial(self._show, tenant, tenant.shows, answers))

    def view(self, tenants: NDArray[np.int64]) -> tuple[View, NDArray[np.int64]]:
        """Return the view of requests of these tenants (int64 [B]), a new object after each change, and the group of
        each request (int64 [B])."""
        if (tenants == tenants[:1]).all():
            return self.view_of(int(tenants[0]) if len(tenants) else 0), np.zeros(len(tenants), np.int64)
        numbers, groups = np.unique(np.maximum(tenants, -1), return_inverse=True)
        views = tuple(map(self.view_of, numbers.tolist()))
        joined = self._joined
        if joined is None or joined[0] != views:
            joined = self._joined = views, View.join(views)
        return joined[1], groups.astype(np.int64)

    def use_static(self, static: Snapshot, source: str = "given") -> None:
        """Replace the static snapshot of all tenants: the configured store, or the one at the URL."""
        with self.lock:
            self._statics[source] = static
            self._choose_static()

    def oldest(self) -> int:
        """Return when the oldest document was learnt, ms since 1970; `FOREVER` without documents."""
        runs = [run for tenant in list(self.tenants.values()) for run in tenant.all_runs]
        return min((int(run.documents[:, 0].min()) for run in runs), default=FOREVER)

    def stats(self) -> LiveStats:
        # Without the lock, since many tenants take long.
        runs = [tenant.all_runs for tenant in list(self.tenants.values())]
        return replace(
            self.counts, tokens=self.held, max_sub_indices=max(map(len, runs)), tenants=len(runs) - 1,
            nbytes=sum(run.sub.nbytes for own in runs for run in own), dropped=Counter(self.counts.dropped),
        )  # fmt: skip

    def free(self) -> None:
        """Free runs that were replaced, in the caller's thread rather than the engine's."""
        self._unused = []

    def close(self) -> None:
        self._background.shutdown(cancel_futures=True)

    def settle(self, timeout: float = 60.0) -> bool:
        """Wait until background tasks are done; return whether they are."""
        end = time.monotonic() + timeout
        while self._tasks and time.monotonic() < end:
            time.sleep(0.001)
        return not self._tasks

    def view_of(self, number: int = 0) -> View:
        """Return the view of one tenant; an unknown one gets the static store only."""
        tenant = self.tenants.get(number)
        if tenant is None:
            return self._static_view
        view = tenant.view
        if view is None:
            with self.lock:
                runs, running = ([], None) if tenant.hidden else (tenant.all_runs, tenant.running)
                view = tenant.view = View.of(self._static, runs, running) if runs or running else self._static_view
        return view

    # With the lock held.

    def _tenant(self, number: int) -> Tenant:
        if number not in self.tenants:
            if len(self.tenants) % _MANY_TENANTS == 0:  # forget those without documents
                for other, tenant in list(self.tenants.items()):
                    text = tenant.all_runs or tenant.running
                    if other and not (tenant.tidying or tenant.waiting or tenant.hidden or text):
                        del self.tenants[other]
            self.tenants[number] = Tenant()
        return self.tenants[number]

    def _hide(self, tenant: Tenant) -> None:
        tenant.shows += 1
        tenant.running = tenant.view = None

    def reason_against(self, tokens: NDArray[np.int32]) -> str:  # "" if there is none
        reasons = {
            "size": len(tokens) >= self.max_tokens // 16,
            "vocabulary": not self._in_vocabulary(tokens),
            "failure": self._failed,
            "room": self.held + len(tokens) + 1 > self.max_tokens
            or (len(tokens) > LARGE_TOKENS and self._waiting > _MAX_WAITING),
        }
        return next((reason for reason, applies in reasons.items() if applies), "")

    def _in_vocabulary(self, tokens: NDArray[np.int32]) -> bool:
        return len(tokens) > 0 and int(tokens.min()) >= 0 and int(tokens.max()) < self.vocab_size

    def refuse(self, reason: str) -> None:
        self.counts.dropped[reason] += 1
        self._make_room()

    def take(self, *records: Record) -> None:
        """Add documents of one tenant."""
        size = sum(record.size for record in records)
        self.held += size
        self.counts.inserted += size - len(records)
        self.counts.documents += len(records)
        owner = self._tenant(0 if self.isolation == "shared" else records[0].tenant)
        rows = [(r.milliseconds, r.tenant, self._documents + i) for i, r in enumerate(records)]
        about = np.array(rows, np.int64)
        self._documents += len(records)
        if len(records) > 1 or size > LARGE_TOKENS:
            owner.waiting += 1
            self._waiting += size
            self._submit(partial(self._sort, owner, records, about, size))
        else:
            new = sorted_run([records[0].tokens], self.vocab_size, about)
            owner.memtable = merged(owner.memtable, new, self.vocab_size)
            owner.view = None
            # Never exceed the number of searched runs, even if the background is slow.
            if owner.memtable.n >= MEMTABLE_TOKENS and len(owner.runs) + owner.waiting + 1 < self._max_runs:
                owner.runs.append(owner.memtable)
                owner.memtable = None
                self._plan(owner)
        self._make_room()

    def _make_room(self) -> None:
        if self.held > self.max_tokens - self.max_tokens // 16 and not self._evicting:
            self._evicting = True
            self._submit(self._evict)

    def _submit(self, task: Callable[[], None], *, always: bool = False) -> None:
        self._tasks += 1
        self._background.submit(self._run, task, always)

    def _plan(self, tenant: Tenant) -> None:
        if not tenant.tidying and tenant.runs_to_replace(self._max_runs, self.max_tokens // 2):
            tenant.tidying = True
            self._submit(partial(self._tidy, tenant))

    @property
    def _max_runs(self) -> int:
        return max(MIN_RUNS, SEARCHED - len(self._static))

    def _choose_static(self) -> None:
        subs = [sub for static in self._statics.values() for sub in static]
        max_static = SEARCHED - MIN_RUNS
        if len(subs) > max_static:
            logger.warning(
                f"freedraft: the datastore has {len(subs)} sub-indices; with what is learnt, at most {SEARCHED} are "
                f"searched, so the smallest {len(subs) - max_static} are left out: make fewer of them with `freedraft "
                "datastore merge`"
            )
            largest = sorted(range(len(subs)), key=lambda i: -subs[i].n)[:max_static]
            subs = [subs[i] for i in sorted(largest)]
        self._static, self._joined = tuple(subs), None
        self._static_view = View.of(self._static)
        for tenant in self.tenants.values():
            tenant.view = None
            self._plan(tenant)

    def _swap(self, tenant: Tenant, inputs: list[Run], result: Run | None, added: int = 0) -> int:
        """Replace consecutive runs, and `added` waiting tokens, by `result`; return the number of tokens removed."""
        at = tenant.runs.index(inputs[0]) if inputs else len(tenant.runs)
        tenant.runs[at : at + len(inputs)] = [result] if result else []
        tenant.view = None
        gone = sum(run.n for run in inputs) + added - (result.n if result else 0)
        self.held -= gone
        self._unused += inputs
        return gone

    # In the background thread, the only one that replaces runs.

    def _run(self, task: Callable[[], None], always: bool) -> None:
        try:
            if always or not self._failed:
                task()
        except Exception:  # out of memory: keep the present runs
            self._failed = True
            logger.exception("freedraft: merging live sub-indices failed; nothing more is learnt until a restart")
        finally:
            with self.lock:
                self._tasks -= 1

    def _show(self, tenant: Tenant, number: int, answers: Sequence[NDArray[np.int32]]) -> None:
        usable = [*filter(self._in_vocabulary, answers)]
        if usable and tenant.shows == number:
            run = sorted_run(usable, self.vocab_size, np.zeros((0, 3), np.int64))
            with self.lock:
                if tenant.shows == number:
                    tenant.running, tenant.view = run, None

    def _remove(self, tenants: list[Tenant], erasure: Erasure, spared: int) -> None:
        """Remove erased documents, and show the tenants' text again. spared: number of the first later document."""
        for tenant in tenants:
            with self.lock:
                runs, memtable = list(tenant.runs), tenant.memtable
                if memtable:
                    tenant.memtable = without(memtable, self.vocab_size, kept(memtable, erasure, spared))
                    self.held += (tenant.memtable.n if tenant.memtable else 0) - memtable.n
            for run in runs:
                if not (keep := kept(run, erasure, spared)).all():
                    left = None if self._failed else without(run, self.vocab_size, keep)
                    with self.lock:
                        self._swap(tenant, [run], left)
            with self.lock:
                tenant.hidden -= 1
                tenant.view = None

    def _combined(self, inputs: list[Run]) -> Run:
        if len(inputs) == 1:
            return inputs[0]
        started, stats = time.perf_counter(), self.counts
        result = merged(inputs[0], inputs[1], self.vocab_size)
        stats.merges, stats.merge_seconds = stats.merges + 1, stats.merge_seconds + time.perf_counter() - started
        return result

    def _tidy(self, tenant: Tenant) -> None:
        while True:
            with self.lock:
                inputs = tenant.runs_to_replace(self._max_runs, self.max_tokens // 2)
                tenant.tidying = bool(inputs)
            if not inputs:
                return
            result = self._combined(inputs)
            with self.lock:
                self._swap(tenant, inputs, result)

    def _sort(self, owner: Tenant, records: tuple[Record, ...], about: NDArray[np.int64], size: int) -> None:
        run = sorted_run([record.tokens for record in records], self.vocab_size, about)
        with self.lock:
            last = owner.runs[-1:] if len(owner.runs) + 1 >= self._max_runs else []
        result = self._combined([*last, run])
        with self.lock:
            owner.waiting -= 1
            self._waiting -= size
            self._swap(owner, last, result, added=size)
            self._plan(owner)
            self._make_room()  # those that were sorted together may exceed the bound

    def _evict(self) -> None:
        """Drop documents beyond the bound: the oldest of tenants above an equal share, those first that taught
        least recently."""
        held = {tenant: sum(run.n for run in tenant.all_runs) for tenant in list(self.tenants.values())}
        bound = self.max_tokens - self.max_tokens // 8
        shares = keep_shares(held, bound)
        for tenant in sorted(held, key=lambda tenant: tenant.taught_at):
            excess = held[tenant] - shares[tenant]
            while excess > 0 and tenant.all_runs and self.held > bound:  # documents are dropped whole
                with self.lock:
                    if tenant.memtable and not tenant.runs:
                        tenant.runs, tenant.memtable = [tenant.memtable], None
                    oldest = tenant.runs[0]
                left = without(oldest, self.vocab_size, oldest.starts >= excess)
                with self.lock:
                    gone = self._swap(tenant, [oldest], left)
                    self.counts.evicted += gone
                excess -= gone
        self._evicting = False


def kept(run: Run, erasure: Erasure, spared: int) -> NDArray[np.bool_]:
    """Return bool [d]: which documents of a run are not erased, as those with a number from `spared` on."""
    times, tenants, numbers = run.documents.T
    covered = (numbers < spared) & (times < erasure.before)
    return ~(covered if erasure.tenant is None else covered & (tenants == erasure.tenant))


def _lower_priority() -> None:
    with contextlib.suppress(OSError, AttributeError):  # unsupported on some systems
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
