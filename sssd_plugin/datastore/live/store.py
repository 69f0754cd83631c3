"""`LiveDatastore`: what finished requests wrote becomes datastore, searchable at the next step (papers/sssd.txt 3.1.3).

A log-structured merge: a finished document is merged at once into the tenant's memtable, a small newest run; full runs
are merged into larger ones by one background thread. Runs are immutable, a step's `View` is a table of their addresses,
and a change is a new view, so a step sees one state for its whole batch.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sssd_plugin.datastore.index.runs import Run, View, sorted_run, warm_up, with_document, without
from sssd_plugin.datastore.index.sub_index import Snapshot
from sssd_plugin.datastore.live.clock import SteadyClock
from sssd_plugin.datastore.live.database import Erasure, Record, keep_shares
from sssd_plugin.datastore.live.folder import Isolation
from sssd_plugin.datastore.live.log import DocumentLog
from sssd_plugin.datastore.live.merging import Merge, MergeThread
from sssd_plugin.datastore.live.tenants import Tenant, kept, tenant_digest, writer_of

logger = logging.getLogger("freedraft.datastore")

SEARCHED = 8
"""Sub-indices that are searched at most, static ones included (papers/sssd.txt 3.1.3)."""
MAX_TOKENS = 16 << 20
MIN_TOKENS = 1 << 14
MEMTABLE_TOKENS = 1 << 12
"""Size at which the memtable is left as it is: merging a document into it costs a pass over it."""
LARGE_TOKENS = 1 << 12
"""Larger documents are sorted in the background, so that they do not hold up the engine."""
SYNC_SECONDS = 0.2
"""What arrived within the last so many seconds may be lost when the machine stops."""
AGE_STEPS = 32
"""What is too old goes within the so many-th part of the greatest age."""
_MAX_WAITING = 1 << 20  # tokens of large documents
_MANY_TENANTS = 4096
_TENANT_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class LiveStats:
    """The state of a live datastore."""

    tokens: int  # held, separators included
    delta_tokens: int  # of these, in memtables
    max_sub_indices: int  # runs of one tenant
    nbytes: int  # memory of all runs
    tenants: int  # known, requests of none included
    documents: int  # taken since the start
    inserted: int  # their tokens
    insert_seconds: float  # spent on taking them, in the callers' threads
    merges: int  # in the background
    merge_seconds: float
    longest_merge: float  # seconds
    dropped: dict[str, int]  # documents that were not taken, by reason

    @property
    def named_tenants(self) -> int:
        return self.tenants - 1


class LiveDatastore:
    """A datastore in memory, and on disk if wanted, that grows while it is drafted from.

    Thread-safe. `insert` costs a pass over at most a few thousand tokens; what it added is in the next `view`, but for
    documents of more than `LARGE_TOKENS`, which take the background a moment.

    Args:
        vocab_size: token ids must be below it; documents with others are left out.
        static: what every tenant drafts from besides.
        isolation: "tenant": what a tenant's requests wrote is seen by that tenant only, and requests of none neither
            teach nor learn; "shared": it is seen by all; "off": by all, and not even the digest of a tenant's name is
            recorded.
        max_tokens: held at most, separators included. Beyond it, who holds most loses its oldest documents first.
        max_age: seconds after which a document is erased; None for never.
        log: where documents are kept on disk; closed with this. What is there is taken over.

    Attributes:
        on_erased: called, in a background thread, when something was erased.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        static: Snapshot | None = None,
        isolation: Isolation = "tenant",
        max_tokens: int = MAX_TOKENS,
        max_age: float | None = None,
        log: DocumentLog | None = None,
        clock: SteadyClock | None = None,
    ) -> None:
        if max_tokens < MIN_TOKENS:
            raise ValueError(f"a live datastore holds at least {MIN_TOKENS} tokens, not {max_tokens}")
        self.vocab_size, self.isolation, self.max_tokens, self.max_age = vocab_size, isolation, max_tokens, max_age
        self.isolated = isolation == "tenant"  # whether requests of different tenants see different views
        self.on_erased: Callable[[], None] = lambda: None
        self._log = log
        self._key = log.key if log else secrets.token_bytes(16)
        self._lock = threading.Lock()
        self._merger = MergeThread(vocab_size, self._on_merged, self._learn_large)
        self._tokens = self._documents = 0
        self._inserted, self._taken, self._insert_seconds = 0, 0, 0.0
        self._dropped: Counter[str] = Counter()
        self._waiting: deque[Record] = deque()  # large documents
        self._set_static(static or Snapshot.empty())
        self._tenants = {0: Tenant(b"", self._static_view)}
        self._next_tenant = 1
        self._numbers: dict[bytes, int] = {b"": 0}
        self._joined: tuple[tuple[View, ...], View] | None = None
        self._clock = clock or SteadyClock()
        self._expire_at = 0  # ms
        self._stop = threading.Event()
        self._keeper: threading.Thread | None = None
        warm_up()
        if log is not None:
            self._load(log.sync()[1])
        if log is not None or max_age is not None:
            self._expire()
            self._keeper = threading.Thread(target=self._keep_up, name="freedraft-log", daemon=True)
            self._keeper.start()

    def tenant(self, name: str | None) -> int:
        """Return the number of a tenant, 0 for requests of none. Only a keyed digest of the name is kept."""
        if not name or self.isolation == "off":
            return 0
        digest = tenant_digest(self._key, name)
        with self._lock:
            return self._number(digest)

    def learns(self, tenant: int) -> bool:
        """Return whether requests of this tenant teach and learn: under "tenant", those of none do not."""
        return tenant > 0 or not self.isolated

    def insert(self, tokens: NDArray[np.int32], tenant: int = 0) -> bool:
        """Take a document (int32 [n]); the next `view` has it.

        Returns:
            Whether it was taken: not if it is of no tenant (see `learns`), is empty, has a sixteenth of `max_tokens` or
            more, holds an id that is none, or there is no room yet because older ones are still being dropped.
        """
        if not len(tokens):
            return False
        started = time.perf_counter()
        with self._lock:
            reason = self._reason_against(tokens, tenant)
            if reason:
                self._dropped[reason] += 1
                return False
            record = Record(self._tenants[tenant].digest, self._clock.milliseconds(), np.array(tokens, np.int32))
            if self._log is not None:
                self._log.append(record)
            self._take(record)
            self._insert_seconds += time.perf_counter() - started
        return True

    def erase(self, erasure: Erasure) -> None:
        """Forget documents in memory: no view made from now on has them."""
        with self._lock:
            if self._log is not None:
                self._log.erase_pending(erasure)
            waiting, self._waiting = self._waiting, deque()
            for record in waiting:
                if erasure.covers(record.tenant, record.milliseconds):
                    self._tokens -= record.size
                else:
                    self._waiting.append(record)
            ended = erasure, self._documents
            for tenant in self._tenants.values():
                if tenant.memtable and not (keep := kept(tenant.memtable, [ended])).all():
                    self._tokens -= tenant.memtable.n
                    tenant.memtable = without(tenant.memtable, self.vocab_size, keep)
                    self._tokens += tenant.memtable.n if tenant.memtable else 0
                tenant.erasures.append(ended)
                if self._merger.failed:  # nobody rewrites runs any more
                    self._tokens -= tenant.n
                    tenant.runs = [run for run in tenant.runs if kept(run, tenant.erasures).all()]
                    self._tokens += tenant.n
                self._plan(tenant)
                tenant.view = self._view_of(tenant)
            self._joined = None
        self.on_erased()

    def view(self, tenants: NDArray[np.int64] | None = None) -> tuple[View, NDArray[np.int64] | None]:
        """Return what a batch drafts from. A tenant that is not known any more sees the static store only.

        Args:
            tenants: int64 [B], the tenant of each request; None if all are of none.

        Returns:
            The view, and the group of each request (int64 [B]), or None where all are in group 0.
        """
        if tenants is None or not len(tenants) or not self.isolated:
            return self._tenants[0].view, None
        if (tenants == tenants[0]).all():
            return self._view_for(int(tenants[0])), None
        numbers, groups = np.unique(tenants, return_inverse=True)
        views = tuple(map(self._view_for, numbers.tolist()))
        if self._joined is None or self._joined[0] != views:
            self._joined = views, View.join(views)
        return self._joined[1], groups.astype(np.int64)

    def use_static(self, static: Snapshot) -> None:
        """Replace what every tenant drafts from besides."""
        with self._lock:
            self._set_static(static)
            for tenant in self._tenants.values():
                tenant.view = self._view_of(tenant)

    def stats(self) -> LiveStats:
        with self._lock:
            tenants = self._tenants.values()
            runs = [run for tenant in tenants for run in tenant.all_runs]
            return LiveStats(
                tokens=self._tokens,
                delta_tokens=sum(tenant.memtable.n for tenant in tenants if tenant.memtable),
                max_sub_indices=max(len(tenant.all_runs) for tenant in tenants),
                nbytes=sum(run.sub.nbytes for run in runs),
                tenants=len(self._tenants),
                documents=self._taken,
                inserted=self._inserted,
                insert_seconds=self._insert_seconds,
                merges=self._merger.merges,
                merge_seconds=self._merger.seconds,
                longest_merge=self._merger.longest,
                dropped=dict(self._dropped) | ({"disk": self._log.dropped} if self._log else {}),
            )

    def settle(self, timeout: float = 60.0) -> bool:
        """Wait until the background has nothing to do; return whether it has not."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            with self._lock:
                if not self._waiting and not any(tenant.busy for tenant in self._tenants.values()):
                    return True
            time.sleep(0.001)
        return False

    def flush(self) -> None:
        """Wait until everything inserted is on disk, or could not be written."""
        self._sync(retry=True)

    def close(self) -> None:
        """Stop the background threads and close the log; may be called twice."""
        self._stop.set()
        if self._keeper is not None:
            self._keeper.join()
            self._keeper = None
        self._merger.close()
        if self._log is not None:
            self._log.close()

    def _keep_up(self) -> None:
        while not self._stop.wait(SYNC_SECONDS):
            try:
                self._sync(retry=False)
                self._expire()
            except Exception:  # what is learnt must not end for it
                logger.exception("freedraft: keeping what is learnt failed; it is tried again. Please report this")

    def _sync(self, retry: bool) -> None:
        """Write what was learnt, and do and learn what other processes have."""
        if self._log is None:
            return
        erasures, records = self._log.sync(retry)
        for erasure in erasures:
            self.erase(erasure)
        for record in records:
            with self._lock:
                tenant = self._number(record.tenant) if self.isolation != "off" else 0
                reason = self._reason_against(record.tokens, tenant)
                if reason:
                    self._dropped[reason] += 1
                else:
                    self._take(record)

    def _expire(self) -> None:
        self._clock.check()
        now = self._clock.milliseconds()
        if self.max_age is None or now < self._expire_at:
            return
        self._expire_at = now + int(self.max_age * 1000 / AGE_STEPS)
        before = now - int(self.max_age * 1000)
        with self._lock:
            runs = [run for tenant in self._tenants.values() for run in tenant.all_runs]
            old = any(run.documents[:, 0].min() < before for run in runs)
        if old:
            self.erase(Erasure(None, before))
        if self._log is not None:
            self._log.expire(before)

    # Below: with the lock held, except `_on_merged` and `_learn_large`.

    @property
    def _max_runs(self) -> int:
        """Runs that a tenant may have."""
        return max(2, SEARCHED - len(self._static.table))

    def _set_static(self, static: Snapshot) -> None:
        subs = static.sub_indices
        max_static = SEARCHED - 2
        if len(subs) > max_static:
            logger.warning(
                "freedraft: the datastore has %d sub-indices; with what is learnt, at most %d are searched, so the "
                "smallest %d are left out: make fewer of them with `freedraft datastore merge`",
                len(subs),
                SEARCHED,
                len(subs) - max_static,
            )
            largest = sorted(sorted(range(len(subs)), key=lambda i: -subs[i].n)[:max_static])
            static = Snapshot.of([subs[i] for i in largest])
        self._static = static
        self._static_view = View.of(static)

    def _reason_against(self, tokens: NDArray[np.int32], tenant: int) -> str:
        """Return why a document cannot be taken, in a word; nothing if it can."""
        if not self.learns(tenant) or tenant not in self._tenants:
            return "tenant"
        if len(tokens) >= self.max_tokens // 16:
            return "size"
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab_size:
            return "vocabulary"
        if self._merger.failed:
            return "failure"
        waiting = len(tokens) > LARGE_TOKENS and sum(record.size for record in self._waiting) > _MAX_WAITING
        return "room" if waiting or self._tokens + len(tokens) + 1 > self.max_tokens else ""

    def _take(self, record: Record) -> None:
        self._tokens += record.size
        self._inserted += record.size - 1
        self._taken += 1
        if record.size > LARGE_TOKENS:
            self._waiting.append(record)
            self._merger.submit(None)
        else:
            owner = self._owner(record)
            owner.memtable = with_document(owner.memtable, record.tokens, self.vocab_size, self._about([record]))
            # At most as many runs as may be searched, however slowly the background merges them.
            if owner.memtable.n >= MEMTABLE_TOKENS and len(owner.runs) + 1 < self._max_runs:
                owner.runs.append(owner.memtable)
                owner.memtable = None
                self._plan(owner)
            owner.view = self._view_of(owner)
        self._drop()

    def _learn_large(self) -> None:
        """Take the oldest large document, unless it was erased meanwhile."""
        with self._lock:
            if not self._waiting:
                return
            record = self._waiting[0]
            about = self._about([record])
        run = sorted_run([record.tokens], self.vocab_size, about)
        with self._lock:
            if not self._waiting or self._waiting[0] is not record:
                return
            owner = self._owner(record)
            full = len(owner.runs) + 1 >= self._max_runs
            if full and owner.busy:  # again behind the merge that makes room
                self._merger.submit(None)
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
        return self._tenants[self._number(record.tenant) if self.isolated else 0]

    def _number(self, digest: bytes) -> int:
        number = self._numbers.get(digest)
        if number is None:
            self._prune()
            number = self._numbers[digest] = self._next_tenant
            self._next_tenant += 1
            self._tenants[number] = Tenant(digest, self._static_view)
        self._tenants[number].asked_for = time.monotonic()
        return number

    def _view_for(self, number: int) -> View:
        tenant = self._tenants.get(number)
        return self._static_view if tenant is None else tenant.view

    def _view_of(self, tenant: Tenant) -> View:
        runs = tenant.visible_runs
        return View.of(self._static, runs) if runs else self._static_view

    def _plan(self, tenant: Tenant) -> None:
        """Start a merge if the tenant's runs want one."""
        inputs = tenant.runs_to_replace(self._max_runs, self.max_tokens // 2)
        if inputs:
            self._start(tenant, inputs)

    def _drop(self) -> None:
        """Drop documents beyond the bound, of who holds more than an equal share, the oldest first: whole runs at once,
        part of a run in the background."""
        if self._tokens <= self.max_tokens - self.max_tokens // 16:
            return
        held = {number: tenant.n for number, tenant in self._tenants.items() if tenant.all_runs}
        for number, share in keep_shares(held, self.max_tokens - self.max_tokens // 8).items():
            tenant, excess = self._tenants[number], held[number] - share
            if excess <= 0 or tenant.busy:
                continue
            if tenant.memtable and not tenant.runs:
                tenant.runs, tenant.memtable = [tenant.memtable], None
            while tenant.runs and tenant.runs[0].n <= excess:
                oldest = tenant.runs.pop(0)
                excess -= oldest.n
                self._tokens -= oldest.n
                self._merger.release([oldest])
            if excess > 0 and tenant.runs:
                self._start(tenant, tenant.runs[:1], excess)
            tenant.view = self._view_of(tenant)

    def _prune(self) -> None:
        """Forget tenants of whom nothing is held. Numbers are not used again: an old request may still have one."""
        if len(self._tenants) % _MANY_TENANTS:
            return
        now = time.monotonic()
        for number, tenant in list(self._tenants.items()):
            if number and not tenant.busy and not tenant.all_runs and now - tenant.asked_for > _TENANT_SECONDS:
                del self._tenants[number], self._numbers[tenant.digest]

    def _start(self, tenant: Tenant, inputs: list[Run], excess: int = 0, more: Run | None = None) -> None:
        tenant.busy = True
        self._merger.submit(Merge(tenant, inputs, excess, more))

    def _on_merged(self, merge: Merge) -> None:
        tenant, result = merge.owner, merge.result
        with self._lock:
            at = next(i for i, run in enumerate(tenant.runs) if run is merge.inputs[0])
            tenant.runs[at : at + len(merge.inputs)] = [result] if result else []
            gone = [*merge.inputs, merge.more] if merge.more else merge.inputs
            self._tokens += (result.n if result else 0) - sum(run.n for run in gone)
            tenant.busy = False
            self._plan(tenant)
            self._drop()
            tenant.view = self._view_of(tenant)
        self._merger.release(merge.inputs)

    def _load(self, records: Iterable[Record]) -> None:
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
        with self._lock:
            for digest, documents in owned.items():
                tenant = self._tenants[self._number(digest)]
                for part in _in_parts(documents, self.max_tokens // 2):
                    texts = [record.tokens for record in part]
                    tenant.runs.append(sorted_run(texts, self.vocab_size, self._about(part)))
                tenant.view = self._view_of(tenant)
            self._tokens += total
            self._drop()
        if skipped:
            logger.warning("freedraft: %d documents on disk hold ids beyond the vocabulary; left out", skipped)
        if total:
            seconds = time.perf_counter() - started
            logger.info("freedraft: %d live tokens of %d tenants ready in %.2f s", total, len(owned), seconds)


def _in_parts(records: Iterable[Record], max_tokens: int) -> Iterator[list[Record]]:
    """Yield consecutive documents, at most `max_tokens` together, separators included, unless one alone is larger."""
    part: list[Record] = []
    total = 0
    for record in records:
        if part and total + record.size > max_tokens:
            yield part
            part, total = [], 0
        part.append(record)
        total += record.size
    if part:
        yield part


def open_live(
    directory: Path | None,
    vocab_size: int,
    *,
    static: Snapshot | None = None,
    fingerprint: str | None = None,
    isolation: Isolation = "tenant",
    max_tokens: int = MAX_TOKENS,
    max_age: float | None = None,
) -> LiveDatastore:
    """Open a live datastore over `directory` (None: in memory only).

    Processes of one host that open the same directory learn from each other.

    Args:
        directory: the store's; what is learnt goes into a folder `live` in it.
        fingerprint: of the model's tokenizer.

    Raises:
        DatastoreError: the directory cannot be read or written, is of another tokenizer, isolation or version, or
            another host learns there.
    """
    log = None
    if directory is not None:
        log = DocumentLog.open(directory, vocab_size, max_tokens, fingerprint, isolation)
    try:
        return LiveDatastore(
            vocab_size, static=static, isolation=isolation, max_tokens=max_tokens, max_age=max_age, log=log
        )
    except BaseException:
        with contextlib.suppress(Exception):
            if log is not None:
                log.close()
        raise
