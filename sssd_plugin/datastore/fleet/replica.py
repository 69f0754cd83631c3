"""`FleetLog`: what one replica publishes to a bucket, and what it fetches of what others learnt.

It takes the place of `live.log.DocumentLog`: the bucket is what keeps the documents. All of it happens in one
background thread, so neither a slow bucket nor one that is down holds up a start or a request.
"""

from __future__ import annotations

import logging
import random
import secrets
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sssd_plugin.datastore.disk.bucket import BATCHES, Bucket, Generation, UnreachableError
from sssd_plugin.datastore.disk.format import Isolation, Manifest, TokenizerEntry, read_manifest
from sssd_plugin.datastore.disk.sections import LearntSubIndex, Section, learnt_sub_indices
from sssd_plugin.datastore.disk.store import Datastore, check_fits
from sssd_plugin.datastore.errors import DatastoreError
from sssd_plugin.datastore.fleet.batch import seal
from sssd_plugin.datastore.fleet.compaction import announce, start
from sssd_plugin.datastore.index.sub_index import Snapshot
from sssd_plugin.datastore.records import Changes, Erasure, PendingRecords, Record

logger = logging.getLogger("freedraft.datastore")

PUBLISH_SECONDS = 2.0
POLL_SECONDS = 2.0
_RETRY_SECONDS = 5.0
_CHECK_SECONDS = 10.0
_JITTER = 0.25  # of a period, so that replicas do not ask at once


@dataclass(frozen=True, slots=True)
class Fetched:
    """A generation of a bucket, mapped.

    Attributes:
        built: sub-indices for everybody.
        until: the replica's own documents from before this time (ms) are in it.
    """

    built: Snapshot
    learnt: list[LearntSubIndex]
    until: int

    def sections(self, digest: bytes, max_sections: int, oldest: int) -> list[Section]:
        """Return what a tenant, or everybody (no digest), is drafted from: of all sections half the newest, since what
        was just learnt is in small ones, and of the others the largest.

        Args:
            oldest: sections with documents from before this time (ms) are left out.
        """
        found = [s for sub in self.learnt if (s := sub.section(digest)) is not None and s.oldest >= oldest]
        found.sort(key=lambda section: -section.newest)
        n_newest = (max_sections + 1) // 2
        others = sorted(found[n_newest:], key=lambda section: -section.n)
        return found[:n_newest] + others[: max_sections - n_newest]


class FleetLog:
    """One replica's end of a bucket. Nothing is raised: what goes wrong is logged once and tried again.

    Args:
        bucket: need not answer yet.
        vocab_size, fingerprint: of the model and its tokenizer.
        isolation: as of the server; the fleet has one.

    Attributes:
        key: of the digests of tenants' names; None until the bucket was reached once on this host.
        pending: what is to be published.
    """

    def __init__(self, bucket: Bucket, vocab_size: int, fingerprint: str | None, isolation: Isolation) -> None:
        self.key: bytes | None = None
        self.pending = PendingRecords()
        self._bucket, self._vocab_size, self._fingerprint, self._isolation = bucket, vocab_size, fingerprint, isolation
        self._replica, self._number = secrets.token_hex(8), 0
        self._generation: Generation | None = None
        self._erasures: set[Erasure] = set()
        self._learnt: list[LearntSubIndex] = []
        self._publish_at = self._poll_at = 0.0
        self._refused = False
        self._last_copy()

    def load(self) -> list[Record]:
        """Nothing: a replica keeps no documents of its own."""
        return []

    def sync(self, retry: bool = True) -> Changes:
        """Publish what is due, and return what is new in the bucket.

        Args:
            retry: whether to do both though they are not due.
        """
        now = time.monotonic()
        changes = Changes([], [])
        try:
            if retry or now >= self._poll_at:
                self._poll_at = _after(now, POLL_SECONDS)
                changes = self._poll()
            if self.key is not None and (retry or now >= self._publish_at):
                self._publish_at = _after(now, PUBLISH_SECONDS)
                self._publish()
        except DatastoreError as error:
            self._poll_at = self._publish_at = _after(now, _RETRY_SECONDS)
            if not self._refused:
                logger.warning("freedraft: %s; what is learnt stays in memory, and it is tried again", error)
            self._refused = True
            return changes
        if self._refused:
            logger.warning("freedraft: %s is used again", self._bucket.url)
        self._refused = False
        return changes

    def expire(self, before: int) -> None:
        """Erase what is older, in ms since 1970, from the bucket, if `compact` has not left it out already."""
        times = np.concatenate([np.zeros(0, np.int64), *(sub.times() for sub in self._learnt)])
        if not (times < before).any():
            return
        try:  # and nothing that is still to be learnt, where this host's clock is ahead
            announce(self._bucket, [Erasure(None, min(before, int(times.max()) + 1))])
        except DatastoreError as error:
            logger.warning("freedraft: %s; what is too old is not drafted from, and erased later", error)

    def close(self) -> None:
        """Publish what is left."""
        self.sync()

    def check(self) -> None:
        """Refuse, before an engine starts, a fleet of another tokenizer or isolation; one that cannot be reached within
        `_CHECK_SECONDS` is no reason.

        Raises:
            DatastoreError: the model or the server does not fit the fleet.
        """
        found: list[DatastoreError] = []

        def poll() -> None:
            try:
                self._poll()
            except DatastoreError as error:
                found.append(error)

        thread = threading.Thread(target=poll, daemon=True)
        thread.start()
        thread.join(_CHECK_SECONDS)
        if found and not isinstance(found[0], UnreachableError):
            raise found[0]
        if found or thread.is_alive():
            reason = found[0] if found else f"{self._bucket.url} does not answer"
            logger.warning("freedraft: %s; the server starts, and tries again", reason)

    def _publish(self) -> None:
        records = self.pending.take()
        if not records:
            return
        until = max(record.milliseconds for record in records) + 1
        # Whether a batch that failed has arrived is not known: a new name for it, and what is there twice is merged.
        name, self._number = f"{BATCHES}/{self._replica}-{self._number:08d}", self._number + 1
        try:
            self._bucket.write(name, seal(records, until))
        except DatastoreError:
            self.pending.give_back(records)
            raise

    def _poll(self, least: int = 0) -> Changes:
        """What is new. least: number of the generation that there is at least."""
        newest = self._bucket.newest(self._generation)
        if newest is not None and newest == self._generation:
            return Changes([], [])
        found = self._bucket.fetch_newest()
        try:
            return self._changes(found, least)
        except DatastoreError:
            if found is None or found[1].exists():
                raise
            return self._poll(least)  # a neighbour on this host has fetched a newer one, and removed it

    def _changes(self, found: tuple[Generation, Path] | None, least: int) -> Changes:
        if (found[0].number if found else 0) < least:
            raise UnreachableError(
                f"{self._bucket.url} cannot be listed: it is down, or that is not allowed (s3:ListBucket)"
            )
        manifest = read_manifest(found[1]) if found else None
        if manifest is not None:
            self._check(manifest)
        if found is None or manifest is None or manifest.learnt is None:
            tokenizer = TokenizerEntry(name="model", fingerprint=self._fingerprint) if self._fingerprint else None
            first = start(self._vocab_size, tokenizer, self._isolation, manifest)
            number = found[0].number + 1 if found else 1
            self._bucket.publish(first, number)  # or somebody else has
            return self._poll(number)
        generation, path = found
        erasures = set(manifest.learnt.forgotten)
        consumed = manifest.learnt.consumed.get(self._replica)
        with Datastore.open(path, verify=False) as store:
            self._learnt = learnt_sub_indices(path, manifest)
            fetched = Fetched(store.snapshot, self._learnt, consumed.until if consumed else 0)
        new, self._erasures = erasures - self._erasures, erasures
        self._generation, self.key = generation, bytes.fromhex(manifest.learnt.key)
        return Changes(list(new), [], fetched)

    def _last_copy(self) -> None:
        """Know the key, if this host has ever reached the bucket."""
        last = self._bucket.last_copy()
        if last is not None and last[1].learnt is not None:
            self.key = bytes.fromhex(last[1].learnt.key)

    def _check(self, manifest: Manifest) -> None:
        check_fits(self._bucket.folder, manifest, self._vocab_size, self._fingerprint)
        if manifest.learnt is not None and manifest.learnt.isolation != self._isolation:
            raise DatastoreError(
                f"the fleet at {self._bucket.url} learns with isolation '{manifest.learnt.isolation}', not "
                f"'{self._isolation}': set that, or choose another URL"
            )


def _after(now: float, seconds: float) -> float:
    return now + seconds * random.uniform(1 - _JITTER, 1 + _JITTER)
