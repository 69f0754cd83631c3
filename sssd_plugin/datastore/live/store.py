"""`LiveStore`: what finished requests wrote becomes datastore at the next step (arXiv 2411.05894, 3.1.3).

A log-structured merge for each tenant: a finished document is merged at once into the memtable, a small newest run;
full memtables become runs, which one background thread merges into larger ones. Runs are immutable, a step's `View` is
a table of their addresses, and a change is a new view, so a step sees one state for its whole batch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from sssd_plugin.datastore.disk.format import TENANTS_APART, Isolation
from sssd_plugin.datastore.errors import DatastoreError
from sssd_plugin.datastore.index.runs import Run, View, merged, release, sorted_run, warm_up, with_document, without
from sssd_plugin.datastore.index.sub_index import Snapshot
from sssd_plugin.datastore.live.conversations import KnownBeginnings
from sssd_plugin.datastore.live.exchange import Exchange
from sssd_plugin.datastore.live.log import Log
from sssd_plugin.datastore.live.tenant import Erasures, Tenant, kept, tenant_digest, writer_of
from sssd_plugin.datastore.records import Changes, Erasure, Record, in_parts, keep_shares, now_ms

logger = logging.getLogger("freedraft.datastore")

MAX_TOKENS = 4 << 20
MIN_TOKENS = 1 << 14
NOBODY = -1
"""Number of no tenant: it sees the static store only and teaches nobody."""
SEARCHED = 8
"""Sub-indices that are searched at most, static ones included (arXiv 2411.05894, 3.1.3)."""
MIN_RUNS = 2
"""That a tenant may have, however many static sub-indices are searched."""
MEMTABLE_TOKENS = 1 << 12
"""Size at which the memtable becomes a run: merging a document into it costs a pass over it."""
LARGE_TOKENS = 1 << 12
"""Larger documents are sorted in the background, so that they do not hold up the engine."""
NICE = 10
"""Of the background thread."""
SYNC_SECONDS = 0.2
"""Interval between writes to the log: what arrived since the last one may be lost when the machine stops."""
RETRY_SECONDS = 5.0
AGE_STEPS = 32
"""Documents that are too old go within the greatest age divided by AGE_STEPS."""
_BULK_TOKENS = 1 << 10  # of one tenant's documents from elsewhere, which are then sorted together
_MAX_WAITING = 1 << 20  # tokens of large documents
_MANY_TENANTS = 4096
_TENANT_SECONDS = 3600.0


@dataclass(slots=True)
class LiveStats:
    """The state of a live store."""

    tokens: int = 0  # held, separators included
    max_sub_indices: int = 0  # runs of one tenant
    nbytes: int = 0  # memory of all runs
    tenants: int = 0  # known, requests of none not counted
    documents: int = 0  # taken since the start
    inserted: int = 0  # their tokens
    merges: int = 0  # in the background
    merge_seconds: float = 0.0
    longest_merge: float = 0.0  # seconds
    evicted: int = 0  # tokens that were dropped to make room
    dropped: Counter[str] = field(default_factory=Counter)  # documents that were not taken, by reason


class LiveStore:
    """A datastore in memory, and on disk or in a bucket if wanted, that grows while it is drafted from. Thread-safe.

    `insert` costs a pass over at most a few thousand tokens; the next `view` holds the document, but for large ones,
    which take the background a moment.

    Args:
        vocab_size: token ids must be below it; documents with others are left out.
        static: what every tenant drafts from in addition.
        isolation: "salt": what a tenant's requests wrote is seen by that tenant only, and requests of none are one
            tenant; "strict": the same, but requests of none neither teach nor learn; "shared": it is seen by all;
            "off": by all, and not even the digest of a tenant's name is recorded.
        max_tokens: held at most, separators included. Beyond it, tenants that hold most lose their oldest documents.
        max_age: seconds after which a document is erased; None for never.
        log: where documents are kept; closed with this. Documents on disk are taken over.

    Attributes:
        tenants: by number; 0 is that of requests of none, and of all where they are not kept apart.
        on_erased: called, in a background thread, when something was erased.

    Raises:
        ValueError: an argument out of range.
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        static: Snapshot | None = None,
        isolation: Isolation = "salt",
        max_tokens: int = MAX_TOKENS,
        max_age: float | None = None,
        log: Log | Exchange | None = None,
    ) -> None:
        if max_tokens < MIN_TOKENS:
            raise ValueError(f"a live datastore holds at least {MIN_TOKENS} tokens, not {max_tokens}")
        self.vocab_size, self.isolation, self.max_tokens, self.max_age = vocab_size, isolation, max_tokens, max_age
        self.isolated = isolation in TENANTS_APART
        self.on_erased: Callable[[], None] = lambda: None
        self.lock = threading.Lock()
        self.tenants = {0: Tenant(b"")}
        self._numbers, self._next_tenant = {b"": 0}, 1
        self._background = ThreadPoolExecutor(1, "freedraft-live", initializer=_lower_priority)
        self._tasks = 0  # of the background, queued or running
        self._failed = False
        self._unused: list[Run] = []
        self._waiting: deque[list[Record]] = deque()  # to be sorted, each of one tenant
        self._evicting = False
        self._held = self._documents = 0  # tokens, and the number of the next document
        self._stats = LiveStats()
        self._log = log
        self._own_key = secrets.token_bytes(16)
        self._beginnings = KnownBeginnings(max_tokens)
        self._joined: tuple[tuple[View, ...], View] | None = None
        self._built, self._given = Snapshot.empty(), static or Snapshot.empty()
        self._set_static()
        self._latest = self._expire_at = 0  # ms
        self._retry_at = 0.0  # where the log has failed
        self._stop, self._syncing = threading.Event(), threading.Lock()
        warm_up()
        if log is not None:
            started = time.perf_counter()
            self._learn(log.load())
            self.settle(timeout=1e9)
            self._stats = LiveStats()
            logger.info("freedraft: %d live tokens ready in %.2f s", self._held, time.perf_counter() - started)
        self._expire()
        self._keeper = threading.Thread(target=self._keep_up, name="freedraft-log", daemon=True)
        self._keeper.start()

    def tenant(self, name: str | None) -> int:
        """Return the number of a tenant: 0 for requests of none, NOBODY where nothing may be shared. Only a keyed
        digest of the name is kept."""
        if not name or self.isolation == "off":
            return NOBODY if self.isolation == "strict" else 0
        if self.key is None:
            return NOBODY if self.isolated else 0
        digest = tenant_digest(self.key, name)
        with self.lock:
            return self._number(digest)

    @property
    def key(self) -> bytes | None:
        """Key of tenants' digests; None until the bucket's is known."""
        return self._log.key if self._log else self._own_key

    def insert(self, tokens: NDArray[np.int32], tenant: int = 0, *, conversation: bool = False) -> bool:
        """Take a document (int32 [n]); the next `view` has it.

        Args:
            conversation: whether it may begin with what earlier documents hold already, which is then not taken again.

        Returns:
            Whether it was taken; `stats` counts why not.
        """
        if not len(tokens):
            return False
        with self.lock:
            reason = self._reason_against(tokens, tenant)
            if reason:
                self._stats.dropped[reason] += 1
                return False
            if conversation:
                tokens = self._beginnings.new_part(tokens, tenant)
            record = Record(self.tenants[tenant].digest, self._now(), np.array(tokens, np.int32))
            if self._log is not None:
                self._log.pending.append(record)
            self._take(record)
        return True

    def erase(self, erasure: Erasure) -> None:
        """Forget documents in memory: no view made after this has them. Other tenants' requests go on meanwhile."""
        if self._log is not None:
            self._log.pending.erase(erasure)
        with self.lock:
            left = [[r for r in part if not erasure.covers(r.tenant, r.milliseconds)] for part in self._waiting]
            self._held -= sum(r.size for part in self._waiting for r in part) - sum(
                r.size for part in left for r in part
            )
            self._waiting = deque(filter(None, left))
            ended = erasure, self._documents
            of_one = self.isolated and erasure.tenant is not None
            numbers = [self._numbers.get(erasure.tenant or b"", -1)] if of_one else list(self.tenants)
            self._beginnings.clear()
        for number in numbers:
            with self.lock:
                if number in self.tenants:
                    self._erase(self.tenants[number], ended)
        self.on_erased()

    def view(self, tenants: NDArray[np.int64] | None = None) -> tuple[View, NDArray[np.int64] | None]:
        """Return what requests of these tenants (int64 [B]; None: of none) draft from, an immutable value, another
        object after each change; and the group of each in it (int64 [B]; None: all are in group 0). A tenant that is
        forgotten sees the static store only."""
        if tenants is None or not len(tenants) or not self.isolated:
            return self._view_of(0), None
        if (tenants == tenants[0]).all():
            return self._view_of(int(tenants[0])), None
        numbers, groups = np.unique(tenants, return_inverse=True)
        views = tuple(map(self._view_of, numbers.tolist()))
        joined = self._joined
        if joined is None or joined[0] != views:
            joined = self._joined = views, View.join(views)
        return joined[1], groups.astype(np.int64)

    def use_static(self, static: Snapshot) -> None:
        """Replace what every tenant drafts from in addition."""
        with self.lock:
            self._given = static
            self._set_static()

    def settle(self, timeout: float = 60.0) -> bool:
        """Wait until the background has nothing to do; return whether it has not."""
        end = time.monotonic() + timeout
        while self._tasks and time.monotonic() < end:
            time.sleep(0.001)
        return not self._tasks

    def stats(self) -> LiveStats:
        """Return the present state, without a lock: with many tenants it takes a while."""
        runs = [tenant.all_runs for tenant in list(self.tenants.values())]
        unwritten = {"disk": self._log.pending.dropped} if self._log else {}
        return replace(
            self._stats,
            tokens=self._held,
            max_sub_indices=max(map(len, runs)),
            nbytes=sum(run.sub.nbytes for own in runs for run in own),
            tenants=len(runs) - 1,
            dropped=Counter(self._stats.dropped | unwritten),
        )

    def flush(self) -> None:
        """Wait until everything inserted is written, or could not be."""
        with self._syncing:
            self._sync(retry=True)

    def close(self) -> None:
        """Write what is queued, stop the background threads and close the log; may be called twice."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._keeper.join()
        self.flush()
        self._background.shutdown(cancel_futures=True)
        if self._log is not None:
            self._log.close()

    # In the thread that keeps up with the log and the clock, and frees runs; with `_syncing` held.

    def _keep_up(self) -> None:
        while not self._stop.wait(SYNC_SECONDS):
            try:
                with self._syncing:
                    self._expire()
                    self._sync(retry=False)
                with self.lock:
                    unused, self._unused = self._unused, []
                unused = release(unused)
                with self.lock:
                    self._unused += unused
            except Exception:  # learning must not end for it
                logger.exception("freedraft: keeping what is learnt failed; it is tried again. Please report this")

    def _sync(self, retry: bool) -> None:
        """Write new documents; apply erasures and take documents of other processes. A log that fails is tried again
        after a while (retry: now), which is said once."""
        if self._log is None or (not retry and time.monotonic() < self._retry_at):
            return
        changes = Changes()
        try:
            self._log.sync(changes, retry)
            if self._retry_at:
                logger.warning("freedraft: writing what is learnt works again")
            self._retry_at = 0.0
        except DatastoreError as error:
            if not self._retry_at:
                logger.warning("freedraft: %s; what is learnt stays in memory, and writing is tried again", error)
            self._retry_at = time.monotonic() + RETRY_SECONDS
        if changes.built:
            with self.lock:
                self._built = changes.built[0]
                self._set_static()
        for erasure in changes.erasures:
            self.erase(erasure)
        self._learn(changes.records)

    def _expire(self) -> None:
        now = self._now()
        if self.max_age is None or now < self._expire_at:
            return
        age = int(self.max_age * 1000)
        self._expire_at = now + age // AGE_STEPS
        runs = [run for tenant in list(self.tenants.values()) for run in tenant.all_runs]
        if any(int(run.documents[:, 0].min()) < now - age for run in runs):
            self.erase(Erasure(None, now - age))
        if self._log is not None:
            try:
                self._log.expire(now - age)
            except DatastoreError as error:
                logger.warning("freedraft: %s; what is too old is erased later", error)

    def _learn(self, records: list[Record]) -> None:
        """Take documents of the log: one by one where there are few, else sorted together in the background."""
        if self._failed:  # nothing would be merged or dropped any more
            return
        owned: dict[bytes, list[Record]] = {}
        for record in records:
            if len(record.tokens) and 0 <= int(record.tokens.min()) <= int(record.tokens.max()) < self.vocab_size:
                owned.setdefault(record.tenant if self.isolated else b"", []).append(record)
            else:
                self._stats.dropped["vocabulary"] += 1
        for digest, documents in owned.items():
            parts: list[list[Record]] = [[record] for record in documents]
            if sum(record.size for record in documents) > _BULK_TOKENS:
                parts = list(in_parts(documents, self.max_tokens // 2))
            for part in parts if digest or self.isolation != "strict" else ():
                with self.lock:
                    self._take(*part)

    # With the lock held.

    def _now(self) -> int:
        """Milliseconds since 1970, never less than before."""
        self._latest = max(self._latest, now_ms())
        return self._latest

    def _number(self, digest: bytes) -> int:
        number = self._numbers.get(digest)
        if number is None:
            self._prune()
            number = self._numbers[digest] = self._next_tenant
            self._next_tenant += 1
            self.tenants[number] = Tenant(digest)
        self.tenants[number].used = time.monotonic()
        return number

    def _prune(self) -> None:
        """Forget tenants without documents. Numbers are not used again: an old request may still have one."""
        if len(self.tenants) % _MANY_TENANTS:
            return
        now = time.monotonic()
        for number, tenant in list(self.tenants.items()):
            if number and not tenant.tidying and not tenant.all_runs and now - tenant.used > _TENANT_SECONDS:
                del self.tenants[number], self._numbers[tenant.digest]

    def _owner(self, record: Record) -> Tenant:
        return self.tenants[self._number(record.tenant) if self.isolated else 0]

    def _reason_against(self, tokens: NDArray[np.int32], tenant: int) -> str:
        """Return why a document cannot be taken, in a word; nothing if it can."""
        if self.key is None:
            return "bucket"
        if tenant not in self.tenants:
            return "tenant"
        if len(tokens) >= self.max_tokens // 16:
            return "size"
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab_size:
            return "vocabulary"
        if self._failed:
            return "failure"
        waiting = len(tokens) > LARGE_TOKENS and sum(r.size for part in self._waiting for r in part) > _MAX_WAITING
        return "room" if waiting or self._held + len(tokens) + 1 > self.max_tokens else ""

    def _take(self, *records: Record) -> None:
        size = sum(record.size for record in records)
        self._held += size
        self._stats.inserted += size - len(records)
        self._stats.documents += len(records)
        if len(records) > 1 or size > LARGE_TOKENS:
            self._waiting.append(list(records))
            self._submit(self._sort_waiting)
        else:
            owner = self._owner(records[0])
            about = self._about(list(records))
            owner.memtable = with_document(owner.memtable, records[0].tokens, self.vocab_size, about)
            owner.view = None
            # At most as many runs as may be searched, however slowly the background merges them.
            if owner.memtable.n >= MEMTABLE_TOKENS and len(owner.runs) + 1 < self._max_runs:
                owner.runs.append(owner.memtable)
                owner.memtable = None
                self._plan(owner)
        if self._held > self.max_tokens - self.max_tokens // 16 and not self._evicting:
            self._evicting = True
            self._submit(self._evict)

    def _submit(self, task: Callable[[], None]) -> None:
        self._tasks += 1
        self._background.submit(self._run, task)

    def _about(self, records: list[Record]) -> NDArray[np.int64]:
        """Number documents and return their rows of `Run.documents`."""
        first, self._documents = self._documents, self._documents + len(records)
        return np.array([(r.milliseconds, writer_of(r.tenant), first + i) for i, r in enumerate(records)], np.int64)

    def _erase(self, tenant: Tenant, ended: tuple[Erasure, int]) -> None:
        self._joined = tenant.view = None
        before = tenant.n
        if tenant.memtable and not (keep := kept(tenant.memtable, [ended])).all():
            tenant.memtable = without(tenant.memtable, self.vocab_size, keep)
        if tenant.runs:
            tenant.erasures.append(ended)
            if self._failed:  # nobody rewrites runs any more
                tenant.runs = [run for run in tenant.runs if kept(run, tenant.erasures).all()]
            self._plan(tenant)
        self._held += tenant.n - before

    def _plan(self, tenant: Tenant) -> None:
        if not tenant.tidying and tenant.runs_to_replace(self._max_runs, self.max_tokens // 2):
            tenant.tidying = True
            self._submit(partial(self._tidy, tenant))

    @property
    def _max_runs(self) -> int:
        return max(MIN_RUNS, SEARCHED - len(self._static.table))

    def _set_static(self) -> None:
        subs = self._built.sub_indices + self._given.sub_indices
        max_static = SEARCHED - MIN_RUNS
        if len(subs) > max_static:
            logger.warning(
                f"freedraft: the datastore has {len(subs)} sub-indices; with what is learnt, at most {SEARCHED} are "
                f"searched, so the smallest {len(subs) - max_static} are left out: make fewer of them with `freedraft "
                "datastore merge`"
            )
            largest = sorted(sorted(range(len(subs)), key=lambda i: -subs[i].n)[:max_static])
            subs = tuple(subs[i] for i in largest)
        self._static = Snapshot(subs)
        self._static_view, self._joined = View.of(self._static), None
        for tenant in self.tenants.values():
            tenant.view = None
            self._plan(tenant)

    # Without the lock.

    def _view_of(self, number: int) -> View:
        tenant = self.tenants.get(number)
        if tenant is None:
            return self._static_view
        view = tenant.view
        if view is None:
            with self.lock:
                runs = tenant.visible_runs
                view = tenant.view = View.of(self._static, runs) if runs else self._static_view
        return view

    # In the background thread, which alone replaces runs.

    def _run(self, task: Callable[[], None]) -> None:
        try:
            if not self._failed:
                task()
        except Exception:  # out of memory: keep the runs there are
            self._failed = True
            logger.exception("freedraft: merging live sub-indices failed; nothing more is learnt until a restart")
        finally:
            with self.lock:
                self._tasks -= 1

    def _combined(
        self, inputs: list[Run], erasures: Erasures, excess: int = 0, newest: Run | None = None
    ) -> Run | None:
        """Merge runs, the newest two first, without erased documents and without documents that start in the first
        `excess` tokens of a run."""
        started, result, stats = time.perf_counter(), newest, self._stats
        for run in reversed(inputs):
            keep = kept(run, erasures)
            left = run if keep.all() and not excess else without(run, self.vocab_size, keep, excess)
            if left is not None:
                result = left if result is None else merged(left, result, self.vocab_size)
        seconds = time.perf_counter() - started
        stats.merges, stats.merge_seconds = stats.merges + 1, stats.merge_seconds + seconds
        stats.longest_merge = max(stats.longest_merge, seconds)
        return result

    def _swap(self, tenant: Tenant, inputs: list[Run], result: Run | None, added: int = 0) -> int:
        """Put `result` in the place of runs and of `added` tokens that waited. With the lock held."""
        tenant.replace(inputs, result)
        gone = sum(run.n for run in inputs) + added - (result.n if result else 0)
        self._held -= gone
        self._unused += inputs
        return gone

    def _tidy(self, tenant: Tenant) -> None:
        """Merge the tenant's runs, and rewrite them without erased documents, until nothing is left to do."""
        while True:
            with self.lock:
                inputs = tenant.runs_to_replace(self._max_runs, self.max_tokens // 2)
                tenant.tidying, erasures = bool(inputs), list(tenant.erasures)
            if not inputs:
                return
            result = self._combined(inputs, erasures)
            with self.lock:
                self._swap(tenant, inputs, result)

    def _sort_waiting(self) -> None:
        """Make runs of large documents and of many at once, unless they are erased meanwhile."""
        while True:
            with self.lock:
                if not self._waiting:
                    return
                records = self._waiting[0]
                about, owner = self._about(records), self._owner(records[0])
                last = owner.runs[-1:] if len(owner.runs) + 1 >= self._max_runs else []
                erasures = list(owner.erasures)
            run: Run | None = sorted_run([record.tokens for record in records], self.vocab_size, about)
            if last:
                run = self._combined(last, erasures, newest=run)
            with self.lock:
                full = not last and len(owner.runs) + 1 >= self._max_runs
                if not full and self._waiting and self._waiting[0] is records:
                    self._waiting.popleft()
                    self._swap(owner, last, run, added=sum(record.size for record in records))
                    self._plan(owner)

    def _evict(self) -> None:
        """Drop documents beyond the bound, of tenants above an equal share, the oldest first."""
        held = {tenant: tenant.n for tenant in list(self.tenants.values())}
        for tenant, share in keep_shares(held, self.max_tokens - self.max_tokens // 8).items():
            excess = held[tenant] - share
            while excess > 0:
                with self.lock:
                    if tenant.memtable and not tenant.runs:
                        tenant.runs, tenant.memtable = [tenant.memtable], None
                    oldest, erasures = tenant.runs[:1], list(tenant.erasures)
                if not oldest:
                    break
                left = self._combined(oldest, erasures, excess) if oldest[0].n > excess else None
                with self.lock:
                    gone = self._swap(tenant, oldest, left)
                    self._stats.evicted += gone
                excess = 0 if left else excess - gone
        self._evicting = False


def _lower_priority() -> None:
    with contextlib.suppress(OSError, AttributeError):  # where the system can: the engine's threads go first
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
