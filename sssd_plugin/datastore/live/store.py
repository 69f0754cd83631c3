"""`LiveStore`: outputs of finished requests become datastore at the next step (arXiv 2411.05894, 3.1.3); `check_live`:
whether one would open."""

import logging
import secrets
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sssd_plugin.datastore.disk.format import LIVE, MAX_VOCAB_SIZE, Isolation
from sssd_plugin.datastore.disk.remote import UnreachableError
from sssd_plugin.datastore.errors import DatastoreError, reporting
from sssd_plugin.datastore.index.sub_index import Snapshot
from sssd_plugin.datastore.live.exchange import Exchange
from sssd_plugin.datastore.live.folder import FolderLock, LiveManifest
from sssd_plugin.datastore.live.log import Log
from sssd_plugin.datastore.live.runs import LearntRuns
from sssd_plugin.datastore.records import Changes, Erasure, LiveStats, Record, now_ms

logger = logging.getLogger("freedraft.datastore")

MAX_TOKENS = 4 << 20
SYNC_SECONDS = 0.2  # between writes to the log: maximum loss on power failure
RETRY_SECONDS = 5.0
AGE_STEPS = 32  # expired documents are removed within max_age / AGE_STEPS
_CHECK_SECONDS = 10.0


class LiveStore:
    """A growing datastore in memory, optionally on disk or at a URL. Thread-safe.

    Args:
        vocab_size: documents with ids of this or above are refused.
        place: the directory of a store, where learnt text goes into a folder `live`; a URL, see `Exchange`; None: in
            memory only. Processes of one host with the same directory learn from each other, and those of any host with
            the same URL.
        static: static snapshot of all tenants.
        fingerprint: of the model's tokenizer. None: not checked.
        isolation: as of `SssdOptions`.
        max_tokens: maximum held, separators included. Beyond it, the largest tenants lose their oldest documents.
        max_age: seconds after which a document is erased; None for never.

    Attributes:
        runs: what was learnt, in memory: requests draft from it.

    Raises:
        DatastoreError: the directory cannot be read or written, has another tokenizer, isolation or version, or another
            host learns there.
    """

    def __init__(
        self, vocab_size: int, place: Path | str | None = None, *, static: Snapshot = (),
        fingerprint: str | None = None, isolation: Isolation = "salt", max_tokens: int = MAX_TOKENS,
        max_age: float | None = None,
    ) -> None:  # fmt: skip
        self.runs = LearntRuns(vocab_size, static, isolation, max_tokens)
        self._max_age_ms = None if max_age is None else int(max_age * 1000)
        self._own_key = secrets.token_bytes(16)
        self._latest = self._expire_at = 0  # ms
        self._retry_at = 0.0  # once the log has failed
        self._stop, self._syncing = threading.Event(), threading.Lock()
        self._log: Log | Exchange | None = None
        server = LiveManifest(vocab_size=vocab_size, fingerprint=fingerprint, isolation=isolation)
        if "://" in str(place):
            self._log = Exchange(str(place), server, max_tokens, max_age)
        elif place is not None:
            self._log = Log.open(Path(place), server, max_tokens)
            self._load(self._log)
        self._expire()
        self._keeper = threading.Thread(target=self._keep_up, name="freedraft-log", daemon=True)
        self._keeper.start()

    def _load(self, log: Log) -> None:
        started = time.perf_counter()
        try:
            self.runs.learn(log.load())
        except BaseException:
            log.close()
            raise
        self.runs.settle(timeout=1e9)
        self.runs.counts = LiveStats()
        seconds = time.perf_counter() - started
        logger.info("freedraft: loaded %s learnt tokens in %.2f s", f"{self.runs.held:,}", seconds)

    @property
    def key(self) -> bytes | None:
        """Secret of `tenant_number`; None until the bucket's is known."""
        return self._log.key if self._log else self._own_key

    def insert(self, tokens: NDArray[np.int32], tenant: int = 0) -> bool:
        """Insert a document (int32 [n]) of a tenant (`tenant_number`; negative: of a request that shares nothing),
        visible in the next view, a large one a moment later; return whether it was taken (`stats` counts refusals)."""
        if not len(tokens):
            return False
        least = 1 if self.runs.isolation == "strict" else 0
        with self.runs.lock:
            reason = "bucket" if self.key is None else "tenant" if tenant < least else self.runs.reason_against(tokens)
            if reason:
                self.runs.refuse(reason)
                return False
            record = Record(tenant, self._now(), np.array(tokens, np.int32))
            if self._log is not None:
                self._log.pending.append(record)
            self.runs.take(record)
        return True

    def erase(self, erasure: Erasure) -> None:
        """Forget documents, also unwritten ones; see `LearntRuns.erase`."""
        if self._log is not None:
            self._log.pending.erase(erasure)
        self.runs.erase(erasure)

    def stats(self) -> LiveStats:
        stats = self.runs.stats()
        if self._log is not None:
            stats.dropped["disk"] = self._log.pending.dropped
        return stats

    def flush(self) -> None:
        """Return when all inserted documents are written, or have failed."""
        with self._syncing:
            self._sync(retry=True)

    def close(self) -> None:
        """Write queued documents and stop the background threads; may be called twice."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._keeper.join()
        self.flush()
        self.runs.close()
        if isinstance(self._log, Log):
            self._log.close()

    def _now(self) -> int:  # ms since 1970, never less than before
        self._latest = max(self._latest, now_ms())
        return self._latest

    # In the thread that follows the log and the clock; with `_syncing` held.

    def _keep_up(self) -> None:
        while not self._stop.wait(SYNC_SECONDS):
            try:
                with self._syncing:
                    self._expire()
                    self._sync(retry=False)
                self.runs.free()
            except Exception:  # a failure must not stop learning
                logger.exception("freedraft: keeping what is learnt failed; it is tried again. Please report this")

    def _sync(self, retry: bool) -> None:
        """Write new documents; apply erasures and documents of other processes. A failing log is retried later (retry:
        now) and logged once."""
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
            self.runs.use_static(changes.built, "url")
        for erasure in changes.erasures:
            self.erase(erasure)
        self.runs.learn(changes.records)

    def _expire(self) -> None:
        now, age = self._now(), self._max_age_ms
        if age is None or now < self._expire_at:
            return
        self._expire_at = now + age // AGE_STEPS
        if self.runs.oldest() < now - age:
            self.erase(Erasure(None, now - age))
        if self._log is not None:
            try:
                self._log.expire(now - age)
            except DatastoreError as error:
                logger.warning("freedraft: %s; what is too old is erased later", error)


def check_live(place: Path | str, vocab_size: int | None, fingerprint: str | None, isolation: Isolation) -> None:
    """Raise the errors of a `LiveStore` at a place before an engine starts, without changing it."""
    server = LiveManifest(vocab_size=vocab_size or MAX_VOCAB_SIZE, fingerprint=fingerprint, isolation=isolation)
    if "://" in str(place):
        _check_url(Exchange(str(place), server))
        return
    folder = Path(place) / LIVE
    with reporting("write", folder):
        if not folder.exists():
            folder.mkdir(mode=0o700, parents=True)
            folder.rmdir()  # a store could not be built there otherwise
            return
    with FolderLock(folder) as lock:
        if manifest := LiveManifest.of(folder):
            manifest.admitting(folder, server, lock.alone)


def _check_url(exchange: Exchange) -> None:
    """Raise the errors of `Exchange.connect`, except that the URL does not answer within `_CHECK_SECONDS`."""
    answer: Future[object] = Future()

    def connect() -> None:
        try:
            answer.set_result(exchange.connect())
        except DatastoreError as error:
            answer.set_exception(error)

    threading.Thread(target=connect, daemon=True).start()
    try:
        answer.result(_CHECK_SECONDS)
    except (UnreachableError, TimeoutError) as error:
        problem = str(error) or f"{exchange.url} does not answer"
        logger.warning("freedraft: %s; the server starts without it, and tries again", problem)
