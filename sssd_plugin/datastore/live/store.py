"""`LiveDatastore`: what finished requests wrote becomes datastore at the next step (arXiv 2411.05894, 3.1.3).

What is learnt stands in `LearntRuns`, and on disk in a `DocumentLog`, if wanted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sssd_plugin.datastore.disk.bucket import Bucket
from sssd_plugin.datastore.disk.format import LIVE, MAX_VOCAB_SIZE, Isolation
from sssd_plugin.datastore.errors import DatastoreError
from sssd_plugin.datastore.fleet.replica import FleetLog
from sssd_plugin.datastore.index.runs import View, warm_up
from sssd_plugin.datastore.index.sub_index import Snapshot
from sssd_plugin.datastore.live.clock import SteadyClock
from sssd_plugin.datastore.live.conversations import KnownBeginnings
from sssd_plugin.datastore.live.folder import FolderLock, LiveManifest
from sssd_plugin.datastore.live.learnt_runs import LearntRuns
from sssd_plugin.datastore.live.log import DocumentLog
from sssd_plugin.datastore.live.tenants import tenant_digest
from sssd_plugin.datastore.records import Erasure, Record

logger = logging.getLogger("freedraft.datastore")

MAX_TOKENS = 16 << 20
MIN_TOKENS = 1 << 14
SYNC_SECONDS = 0.2
"""What arrived within the last so many seconds may be lost when the machine stops."""
AGE_STEPS = 32
"""What is too old goes within the so many-th part of the greatest age."""


@dataclass(frozen=True, slots=True)
class LiveStats:
    """The state of a live datastore."""

    tokens: int  # held, separators included
    max_sub_indices: int  # runs of one tenant
    nbytes: int  # memory of all runs
    tenants: int  # known, requests of none not counted
    documents: int  # taken since the start
    inserted: int  # their tokens
    merges: int  # in the background
    merge_seconds: float
    longest_merge: float  # seconds
    evicted: int  # tokens that were dropped to make room
    dropped: dict[str, int]  # documents that were not taken, by reason


class LiveDatastore:
    """A datastore in memory, and on disk if wanted, that grows while it is drafted from.

    Thread-safe. `insert` costs a pass over at most a few thousand tokens; what it added is in the next `view`, but for
    large documents, which take the background a moment.

    Args:
        vocab_size: token ids must be below it; documents with others are left out.
        static: what every tenant drafts from besides.
        isolation: "tenant": what a tenant's requests wrote is seen by that tenant only, and requests of none neither
            teach nor learn; "shared": it is seen by all; "off": by all, and not even the digest of a tenant's name is
            recorded.
        max_tokens: held at most, separators included. Beyond it, who holds most loses its oldest documents first.
        max_age: seconds after which a document is erased; None for never.
        log: where documents are kept, on disk or in a bucket; closed with this. What is on disk is taken over.

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
        log: DocumentLog | FleetLog | None = None,
        clock: SteadyClock | None = None,
    ) -> None:
        if max_tokens < MIN_TOKENS:
            raise ValueError(f"a live datastore holds at least {MIN_TOKENS} tokens, not {max_tokens}")
        self.vocab_size, self.isolation, self.max_tokens, self.max_age = vocab_size, isolation, max_tokens, max_age
        self.on_erased: Callable[[], None] = lambda: None
        self._log = log
        self._own_key = secrets.token_bytes(16)
        self._dropped: Counter[str] = Counter()
        self.runs = LearntRuns(
            vocab_size, static or Snapshot.empty(), isolated=isolation == "tenant", max_tokens=max_tokens
        )
        self._beginnings = KnownBeginnings(max_tokens)
        self._clock = clock or SteadyClock()
        self._expire_at = 0  # ms
        self._stop = threading.Event()
        self._keeper: threading.Thread | None = None
        warm_up()
        if log is not None:
            self.runs.load(log.load())
        if log is not None or max_age is not None:
            self._expire()
            self._keeper = threading.Thread(target=self._keep_up, name="freedraft-log", daemon=True)
            self._keeper.start()

    def tenant(self, name: str | None) -> int:
        """Return the number of a tenant, 0 for requests of none. Only a keyed digest of the name is kept."""
        if not name or self.isolation == "off" or self._key is None:
            return 0
        digest = tenant_digest(self._key, name)
        with self.runs.lock:
            return self.runs.number(digest)

    @property
    def _key(self) -> bytes | None:
        """Of tenants' digests; None until a fleet's is known."""
        return self._log.key if self._log else self._own_key

    def learns(self, tenant: int) -> bool:
        """Return whether requests of this tenant teach and learn: under "tenant", those of none do not."""
        return self.runs.learns(tenant)

    def insert(self, tokens: NDArray[np.int32], tenant: int = 0, *, conversation: bool = False) -> bool:
        """Take a document (int32 [n]); the next `view` has it.

        Args:
            conversation: whether it may begin with what earlier documents hold already, which is then not taken again.

        Returns:
            Whether it was taken: not if it is of no tenant (see `learns`), is empty, has a sixteenth of `max_tokens` or
            more, holds an id that is none, or there is no room yet because older ones are still being dropped.
        """
        if not len(tokens):
            return False
        with self.runs.lock:
            reason = self.runs.reason_against(tokens, tenant)
            if self._key is None:
                reason = "bucket"
            if reason:
                self._dropped[reason] += 1
                return False
            if conversation:
                tokens = self._beginnings.new_part(tokens, tenant)
            record = Record(self.runs.tenants[tenant].digest, self._clock.milliseconds(), np.array(tokens, np.int32))
            if self._log is not None:
                self._log.pending.append(record)
            self.runs.take(record)
        return True

    def erase(self, erasure: Erasure) -> None:
        """Forget documents in memory: no view made from now on has them."""
        if self._log is not None:
            self._log.pending.erase(erasure)
        self.runs.erase(erasure)
        with self.runs.lock:
            self._beginnings.clear()
        self.on_erased()

    @property
    def isolated(self) -> bool:
        """Whether requests of different tenants see different views."""
        return self.runs.isolated

    def view(self, tenants: NDArray[np.int64] | None = None) -> tuple[View, NDArray[np.int64] | None]:
        """See `LearntRuns.view`."""
        return self.runs.view(tenants)

    def use_static(self, static: Snapshot) -> None:
        """See `LearntRuns.use_static`."""
        self.runs.use_static(static)

    def settle(self, timeout: float = 60.0) -> bool:
        """See `LearntRuns.settle`."""
        return self.runs.settle(timeout)

    def stats(self) -> LiveStats:
        learnt, merger = self.runs, self.runs.merger
        with learnt.lock:
            tenants = learnt.tenants.values()
            runs = [run for tenant in tenants for run in tenant.all_runs]
            return LiveStats(
                tokens=learnt.n,
                max_sub_indices=max(len(tenant.all_runs) for tenant in tenants),
                nbytes=sum(run.sub.nbytes for run in runs),
                tenants=len(learnt.tenants) - 1,
                documents=learnt.taken,
                inserted=learnt.inserted,
                merges=merger.merges,
                merge_seconds=merger.seconds,
                longest_merge=merger.longest,
                evicted=learnt.evicted,
                dropped=dict(self._dropped) | ({"disk": self._log.pending.dropped} if self._log else {}),
            )

    def flush(self) -> None:
        """Wait until everything inserted is on disk, or could not be written."""
        self._sync(retry=True)

    def close(self) -> None:
        """Stop the background threads and close the log; may be called twice."""
        self._stop.set()
        if self._keeper is not None:
            self._keeper.join()
            self._keeper = None
        self.runs.merger.close()
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
        changes = self._log.sync(retry)
        if changes.fetched is not None:
            self.runs.use_fetched(changes.fetched)
        for erasure in changes.erasures:
            self.erase(erasure)
        for record in changes.records:
            with self.runs.lock:
                tenant = self.runs.number(record.tenant) if self.isolation != "off" else 0
                reason = self.runs.reason_against(record.tokens, tenant)
                if reason:
                    self._dropped[reason] += 1
                else:
                    self.runs.take(record)

    def _expire(self) -> None:
        self._clock.check()
        now = self._clock.milliseconds()
        if self.max_age is None or now < self._expire_at:
            return
        step = int(self.max_age * 1000 / AGE_STEPS)
        self._expire_at = now + step
        before = now - int(self.max_age * 1000)
        self.runs.hide_older(before - step)
        with self.runs.lock:
            runs = [run for tenant in self.runs.tenants.values() for run in tenant.all_runs]
            old = any(run.documents[:, 0].min() < before for run in runs)
        if old:
            self.erase(Erasure(None, before))
        if self._log is not None:
            # A fleet's `compact` has the time of a step to leave out the same before all of a section is hidden for it.
            self._log.expire(before - step if isinstance(self._log, FleetLog) else before)


def open_live(
    place: Path | str | None,
    vocab_size: int,
    *,
    static: Snapshot | None = None,
    fingerprint: str | None = None,
    isolation: Isolation = "tenant",
    max_tokens: int = MAX_TOKENS,
    max_age: float | None = None,
) -> LiveDatastore:
    """Open a live datastore over a place (None: in memory only).

    Processes of one host that open the same directory learn from each other, and those of any host at the same URL.

    Args:
        place: the directory of a store, where what is learnt goes into a folder `live`; or a URL, as of `Bucket`.
        fingerprint: of the model's tokenizer.

    Raises:
        DatastoreError: the directory cannot be read or written, is of another tokenizer, isolation or version, or
            another host learns there.
    """
    log: DocumentLog | FleetLog | None = None
    if "://" in str(place):
        log = FleetLog(Bucket(str(place)), vocab_size, fingerprint, isolation)
    elif place is not None:
        log = DocumentLog.open(Path(place), vocab_size, max_tokens, fingerprint, isolation)
    try:
        return LiveDatastore(
            vocab_size, static=static, isolation=isolation, max_tokens=max_tokens, max_age=max_age, log=log
        )
    except BaseException:
        with contextlib.suppress(Exception):
            if log is not None:
                log.close()
        raise


def check_live(place: Path | str, vocab_size: int | None, fingerprint: str | None, isolation: Isolation) -> None:
    """Refuse, before an engine starts, what `open_live` would refuse. Changes no folder.

    Raises:
        DatastoreError: see `open_live`.
    """
    vocab_size = vocab_size or MAX_VOCAB_SIZE
    if "://" in str(place):
        FleetLog(Bucket(str(place)), vocab_size, fingerprint, isolation).check()
        return
    folder = Path(place) / LIVE
    above = folder
    while not above.exists():
        above = above.parent
    if not above.is_dir():
        raise DatastoreError(f"{above} is a file, so nothing can be learnt in {folder}: choose another path")
    if not os.access(above, os.W_OK | os.X_OK):
        raise DatastoreError(f"cannot write {above}: give this user access or choose another path")
    if folder.exists():
        manifest = LiveManifest.of(folder)
        if manifest is not None:
            manifest.check_fits(folder, vocab_size, fingerprint, isolation)
        FolderLock(folder).release()
