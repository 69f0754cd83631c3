"""`LiveDatastore`: what finished requests wrote becomes datastore, searchable at the next step (papers/sssd.txt 3.1.3).

A log-structured merge: a finished document is merged at once into the tenant's memtable, a small newest run; full runs
are merged into larger ones by one background thread. Runs are immutable, a step's `View` is a table of their addresses,
and a change is a new view, so a step sees one state for its whole batch.
"""

from __future__ import annotations

import contextlib
import heapq
import logging
import secrets
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from sssd_plugin.datastore.index.runs import Run, View, sorted_run, warm_up, with_document
from sssd_plugin.datastore.index.sub_index import Snapshot
from sssd_plugin.datastore.live.merging import Merge, MergeThread
from sssd_plugin.datastore.live.records import Record, in_parts
from sssd_plugin.datastore.live.segments import SegmentLog
from sssd_plugin.datastore.live.tenants import Tenant, tenant_digest

logger = logging.getLogger("freedraft.datastore")

Isolation = Literal["tenant", "shared", "off"]

SEARCHED = 8
"""Sub-indices that are searched at most, static ones included (papers/sssd.txt 3.1.3)."""
MAX_TOKENS = 16 << 20
MIN_TOKENS = 1 << 14
MEMTABLE_TOKENS = 1 << 12
"""Size at which the memtable is left as it is: merging a document into it costs a pass over it."""
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

    @property
    def named_tenants(self) -> int:
        return self.tenants - 1


class LiveDatastore:
    """A datastore in memory, and on disk if wanted, that grows while it is drafted from.

    Thread-safe. `insert` costs a pass over at most a few thousand tokens; what it added is in the next `view`.

    Args:
        vocab_size: token ids must be below it; documents with others are left out.
        static: what every tenant drafts from besides.
        isolation: "tenant": what a tenant's requests wrote is seen by that tenant only; "shared": by all;
            "off": by all, and not even the digest of a tenant's name is recorded.
        max_tokens: held at most, separators included; the oldest are dropped first.
        log: where documents are kept on disk; closed with this. What it recovered is taken over.

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
        log: SegmentLog | None = None,
    ) -> None:
        if max_tokens < MIN_TOKENS:
            raise ValueError(f"a live datastore holds at least {MIN_TOKENS} tokens, not {max_tokens}")
        self.vocab_size, self.isolation, self.max_tokens = vocab_size, isolation, max_tokens
        self.isolated = isolation == "tenant"  # whether requests of different tenants see different views
        self._log = log
        self._key = log.key if log else secrets.token_bytes(16)
        self._lock = threading.Lock()
        self._merger = MergeThread(vocab_size, self._on_merged)
        self._tokens = self._documents = 0
        self._inserted, self._taken, self._insert_seconds = 0, 0, 0.0
        self._set_static(static or Snapshot.empty())
        self._tenants = {0: Tenant(b"", self._static_view)}
        self._next_tenant = 1
        self._numbers: dict[bytes, int] = {b"": 0}
        self._joined: tuple[tuple[View, ...], View] | None = None
        warm_up()
        if log is not None:
            self._load(log.take_recovered())

    def tenant(self, name: str | None) -> int:
        """Return the number of a tenant, 0 for requests of none. Only a keyed digest of the name is kept."""
        if not name or self.isolation == "off":
            return 0
        digest = tenant_digest(self._key, name)
        with self._lock:
            return self._number(digest)

    def insert(self, tokens: NDArray[np.int32], tenant: int = 0) -> bool:
        """Take a document (int32 [n]); the next `view` has it.

        Returns:
            Whether it was taken: not if it is empty, has a sixteenth of `max_tokens` or more, holds an id that is none,
            or there is no room yet because older ones are still being dropped.
        """
        n = len(tokens)
        if not 0 < n < self.max_tokens // 16 or self._merger.failed:
            return False
        if int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab_size:
            return False
        started = time.perf_counter()
        with self._lock:
            if tenant not in self._tenants:
                return False
            record = self._tenants[tenant].digest
            owner = self._tenants[tenant if self.isolated else 0]
            if self._tokens + n + 1 > self.max_tokens:
                return False
            owner.memtable = with_document(owner.memtable, tokens, self.vocab_size, self._documents)
            self._documents += 1
            self._tokens += n + 1
            self._inserted += n
            self._taken += 1
            # At most as many runs as may be searched, however slowly the background merges them.
            if owner.memtable.n >= MEMTABLE_TOKENS and len(owner.runs) + 1 < self._max_runs:
                owner.runs.append(owner.memtable)
                owner.memtable = None
                self._plan(owner)
            self._drop()
            owner.view = self._view_of(owner)
            self._insert_seconds += time.perf_counter() - started
        if self._log is not None:
            self._log.append(record, tokens)
        return True

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
            )

    def settle(self, timeout: float = 60.0) -> bool:
        """Wait until no merge is wanted; return whether none is."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            with self._lock:
                if not any(tenant.busy for tenant in self._tenants.values()):
                    return True
            time.sleep(0.001)
        return False

    def flush(self) -> None:
        """Wait until everything inserted is on disk, or could not be written."""
        if self._log is not None:
            self._log.flush()

    def close(self) -> None:
        """Stop the background thread and close the log; may be called twice."""
        self._merger.close()
        if self._log is not None:
            self._log.close()

    # Below: with the lock held, except `_on_merged`.

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

    def _number(self, digest: bytes) -> int:
        number = self._numbers.get(digest)
        if number is None:
            number = self._numbers[digest] = self._next_tenant
            self._next_tenant += 1
            self._tenants[number] = Tenant(digest, self._static_view)
        self._tenants[number].asked_for = time.monotonic()
        return number

    def _view_for(self, number: int) -> View:
        tenant = self._tenants.get(number)
        return self._static_view if tenant is None else tenant.view

    def _view_of(self, tenant: Tenant) -> View:
        return View.of(self._static, tenant.all_runs) if tenant.all_runs else self._static_view

    def _plan(self, tenant: Tenant) -> None:
        """Start a merge if the tenant's runs want one."""
        inputs = tenant.runs_to_merge(self._max_runs, self.max_tokens // 2)
        if inputs:
            self._start(tenant, inputs, 0)

    def _drop(self) -> None:
        """Drop the oldest documents beyond the bound: whole runs at once, part of a run in the background."""
        if self._tokens <= self.max_tokens - self.max_tokens // 16:
            return
        owners = [tenant for tenant in self._tenants.values() if tenant.runs or tenant.memtable]
        oldest_of = [(tenant.all_runs[0].first, number) for number, tenant in enumerate(owners)]
        heapq.heapify(oldest_of)
        while oldest_of and self._tokens > self.max_tokens - self.max_tokens // 8:
            _, number = heapq.heappop(oldest_of)
            tenant = owners[number]
            if tenant.busy:
                break
            if tenant.memtable and not tenant.runs:
                tenant.runs, tenant.memtable = [tenant.memtable], None
            oldest = tenant.runs[0]
            excess = self._tokens - (self.max_tokens - self.max_tokens // 8)
            if oldest.n > excess:
                self._start(tenant, [oldest], excess)
                break
            tenant.runs.pop(0)
            self._merger.release([oldest])
            self._tokens -= oldest.n
            tenant.view = self._view_of(tenant)
            if tenant.all_runs:
                heapq.heappush(oldest_of, (tenant.all_runs[0].first, number))
        self._prune()

    def _prune(self) -> None:
        """Forget tenants of whom nothing is held. Numbers are not used again: an old request may still have one."""
        if len(self._tenants) <= _MANY_TENANTS:
            return
        now = time.monotonic()
        for number, tenant in list(self._tenants.items()):
            if number and not tenant.busy and not tenant.all_runs and now - tenant.asked_for > _TENANT_SECONDS:
                del self._tenants[number], self._numbers[tenant.digest]

    def _start(self, tenant: Tenant, inputs: list[Run], cut: int) -> None:
        tenant.busy = True
        self._merger.submit(Merge(tenant, inputs, cut))

    def _on_merged(self, merge: Merge) -> None:
        tenant, result = merge.owner, merge.result
        with self._lock:
            at = next(i for i, run in enumerate(tenant.runs) if run is merge.inputs[0])
            tenant.runs[at : at + len(merge.inputs)] = [result] if result else []
            self._tokens += (result.n if result else 0) - sum(run.n for run in merge.inputs)
            tenant.busy = False
            self._plan(tenant)
            self._drop()
            tenant.view = self._view_of(tenant)
        self._merger.release(merge.inputs)

    def _load(self, records: Iterable[Record]) -> None:
        """Take over what was on disk."""
        started = time.perf_counter()
        owned: dict[bytes, list[Record]] = {}
        first: dict[bytes, int] = {}
        total = skipped = 0
        for record in records:
            if len(record.tokens) and int(record.tokens.max()) >= self.vocab_size:
                skipped += 1
                continue
            owner = record.tenant if self.isolated else b""
            first.setdefault(owner, self._documents)
            owned.setdefault(owner, []).append(record)
            self._documents += 1
            total += record.size
        with self._lock:
            for digest, documents in owned.items():
                tenant = self._tenants[self._number(digest)]
                number = first[digest]
                for part in in_parts(documents, self.max_tokens // 2):
                    tenant.runs.append(sorted_run([record.tokens for record in part], self.vocab_size, number))
                    number += len(part)
                tenant.view = self._view_of(tenant)
            self._tokens += total
            self._drop()
        if skipped:
            logger.warning("freedraft: %d documents on disk hold ids beyond the vocabulary; left out", skipped)
        if total:
            seconds = time.perf_counter() - started
            logger.info("freedraft: %d live tokens of %d tenants ready in %.2f s", total, len(owned), seconds)


def open_live(
    directory: Path | None,
    vocab_size: int,
    *,
    static: Snapshot | None = None,
    fingerprint: str | None = None,
    isolation: Isolation = "tenant",
    max_tokens: int = MAX_TOKENS,
    writer: bool = True,
    second_writer: Literal["refuse", "read"] = "refuse",
) -> LiveDatastore:
    """Open a live datastore over `directory` (None: in memory only).

    Args:
        directory: the store's; what is learnt goes into a folder `live` in it.
        fingerprint: of the model's tokenizer.
        writer: False only reads what is there.
        second_writer: when another process writes there: "refuse", or "read" what is there and learn in memory only.

    Raises:
        DatastoreError: the directory cannot be read or written, is of another tokenizer or a newer version, or another
            process writes there.
    """
    log = None
    if directory is not None:
        log = SegmentLog.open(directory, vocab_size, max_tokens, fingerprint, writer, second_writer)
    try:
        return LiveDatastore(vocab_size, static=static, isolation=isolation, max_tokens=max_tokens, log=log)
    except BaseException:
        with contextlib.suppress(Exception):
            if log is not None:
                log.close()
        raise
