"""`Exchange`: servers at one URL learn from each other, by write-once batches of documents.

    URL/learnt/manifest.json        tokenizer, isolation, and the key of tenants' numbers; that of the first writer
    URL/learnt/<day>.<server>.<last>.<oldest>.<newest>.<digest>    a batch: documents of one server
    URL/learnt/erased.<before>.<tenant>.due    an erasure; `.done` once no batch holds what it covers

The name of a batch has the day of its newest document, the largest number that its server gave to a document, times of
the oldest and the newest (ms), and a SHA-256. So two servers that remove erased documents from a batch agree on its new
name. Readers skip documents that they have had, by server and number. Expired batches are removed by name. One listing
has erasures and batches, so no reader takes a document that was erased before.
"""

import contextlib
import hashlib
import logging
import random
import re
import secrets
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple, Self

import numpy as np

from sssd_plugin.datastore.disk.format import MANIFEST
from sssd_plugin.datastore.disk.remote import UrlFolder, cache_folder, local_copy
from sssd_plugin.datastore.disk.store import Datastore
from sssd_plugin.datastore.errors import DatastoreError, reporting
from sssd_plugin.datastore.index.sub_index import Snapshot
from sssd_plugin.datastore.live.folder import LiveManifest
from sssd_plugin.datastore.records import Changes, Erasure, PendingRecords, Record, now_ms

logger = logging.getLogger("freedraft.datastore")

POLL_SECONDS = 2.0
FINISH_SECONDS = 10.0  # after which servers finish the work of a killed `forget`
_BATCH_TOKENS = 1 << 16
_DAY = 86_400_000  # ms
_MAX_BYTES = 64 << 20
_DOCUMENT = np.dtype([("number", "<i8"), ("milliseconds", "<i8"), ("tenant", "<i8"), ("length", "<i8")])
_BATCH = re.compile(r"\d{4}-\d\d-\d\d\.([0-9a-f]{16})\.(\d{12})\.(\d{13})\.(\d{13})\.[0-9a-f]{32}")
_ERASED = re.compile(r"erased\.(\d{1,15})\.(all|[0-9a-f]{16})\.(due|done)")

Document = tuple[int, Record]
"""A document, preceded by the number that its server gave to it."""


class Batch(NamedTuple):  # as its name describes it
    server: str
    last: int
    oldest: int
    newest: int
    name: str
    size: int = 0


class Listing(NamedTuple):
    """All names below the URL: batches, erasures, partial files of killed processes, others."""

    batches: list[Batch]
    erasures: dict[Erasure, str]
    parts: list[str]
    strange: set[str]

    @classmethod
    def of(cls, sizes: Mapping[str, int]) -> Self:
        listing = cls([], {}, [], set())
        for name, size in sorted(sizes.items()):
            if (match := _BATCH.fullmatch(name)) and size <= _MAX_BYTES:
                listing.batches.append(Batch(match[1], int(match[2]), int(match[3]), int(match[4]), name, size))
            elif match := _ERASED.fullmatch(name):
                tenant = None if match[2] == "all" else int(match[2], 16)
                listing.erasures[Erasure(tenant, int(match[1]))] = name
            elif name.startswith("."):
                listing.parts.append(name)
            elif name != MANIFEST:
                listing.strange.add(name)
        return listing


def seal(server: str, documents: list[Document]) -> tuple[str, bytes]:
    """Return the name and the contents of a batch: int64 n, n rows of `_DOCUMENT`, int32 tokens."""
    rows = [(number, r.milliseconds, r.tenant, len(r.tokens)) for number, r in documents]
    texts = [np.ascontiguousarray(record.tokens, "<i4").tobytes() for _, record in documents]
    data = b"".join([np.int64(len(rows)).tobytes(), np.array(rows, _DOCUMENT).tobytes(), *texts])
    oldest, newest = min(row[1] for row in rows), max(row[1] for row in rows)
    day = datetime.fromtimestamp(newest / 1000, UTC)
    numbers = f"{rows[-1][0]:012d}.{oldest:013d}.{newest:013d}"
    return f"{day:%Y-%m-%d}.{server}.{numbers}.{hashlib.sha256(data).hexdigest()[:32]}", data


def unseal(batch: Batch, data: bytes, vocab_size: int) -> list[Document]:
    """Return the documents of `seal`. Raises DatastoreError: the contents are damaged, do not match the name, or have
    ids beyond the vocabulary."""
    with contextlib.suppress(ValueError, OverflowError, OSError):  # impossible sizes and times
        table = np.frombuffer(data, _DOCUMENT, max(1, int(np.frombuffer(data, "<i8", 1)[0])), 8)
        tokens = np.frombuffer(data, "<i4", offset=8 + table.nbytes).astype(np.int32)
        numbers, times, tenants, lengths = (table[name].tolist() for name in _DOCUMENT.names or ())
        whole = min(tenants) >= 0 < min(lengths) and sum(lengths) == len(tokens) and numbers == sorted(set(numbers))
        if whole and int(tokens.min()) >= 0 and int(tokens.max()) < vocab_size:
            texts = np.split(tokens, np.cumsum(lengths)[:-1])
            documents = list(zip(numbers, map(Record, tenants, times, texts), strict=True))
            if seal(batch.server, documents)[0] == batch.name:
                return documents
    raise DatastoreError(f"the batch {batch.name} is damaged, or holds ids beyond the vocabulary")


class Exchange:
    """One server's side of a URL, used like a `Log`. A single background thread uses it, so a slow or unreachable URL
    delays no start and no request.

    Args:
        url: of any fsspec driver; it need not be reachable yet.
        server: the manifest that the server would write. All servers at the URL have the same isolation; "salt" and
            "strict" go together.
        max_tokens: of the newest documents, to read at the start.
    """

    def __init__(self, url: str, server: LiveManifest, max_tokens: int = 1 << 24, max_age: float | None = None) -> None:
        self.url, self.pending, self._own = url.rstrip("/"), PendingRecords(), server
        self._max_tokens, self._span = max_tokens, _DAY if max_age is None else min(_DAY, int(max_age * 1000 / 32))
        self._folder, self._above = UrlFolder(self.url, "learnt"), UrlFolder(self.url)
        self._cached = cache_folder() / f"{hashlib.sha256(self.url.encode()).hexdigest()[:32]}.json"
        self._server, self._number = secrets.token_hex(8), 0
        self._reached = self._expiring = False
        self._poll_at, self._oldest = 0.0, 0
        self._handled, self._strange = set[str](), set[str]()  # names of batches, and of other files
        self._seen = {self._server: 1 << 62}  # by server, the largest number read
        self._until: dict[int | None, int] = {}  # by tenant (None: all), time until which documents are erased
        self._applied: set[Erasure] = set()
        self._due: dict[str, float] = {}  # when each due erasure was first seen
        self._unsent: list[Document] = []
        self._open: list[Document] = []  # the batch that grows
        self.key: bytes | None = None  # of `tenant_number`
        with contextlib.suppress(DatastoreError):  # it was never reached from this host
            self.key = bytes.fromhex(LiveManifest.read(self._cached).key)

    def sync(self, changes: Changes, retry: bool = True) -> None:
        """Publish new documents; add erasures and documents of others to `changes`. retry: even if it is not due."""
        if retry or time.monotonic() >= self._poll_at:
            self._poll_at = time.monotonic() + POLL_SECONDS * random.uniform(0.75, 1.25)  # servers do not ask at once
            if not self._reached:
                changes.built = self.connect()
            listing = self._pull(changes)
            self._send()
            self._unsent = list(enumerate(self.pending.take(), self._number))
            self._number += len(self._unsent)
            self._send()
            self._finish_erasures(listing)

    def expire(self, before: int) -> None:
        """Ignore documents before this time (ms), and erase them at the URL with the next `sync`."""
        self._oldest, self._expiring = before, True
        if self._open and self._open[0][1].milliseconds < before:
            self._open = []

    def connect(self) -> Snapshot:
        """Read the manifest, or write the first one; return the built store at the URL, empty without one. Raises
        DatastoreError: model, server or version do not match the URL's."""
        manifest = self.manifest()
        if manifest is None:
            if self._list().batches:
                raise DatastoreError(f"{self.url}/learnt/{MANIFEST} is missing though there are batches: restore it")
            self._folder.create(MANIFEST, self._own.content())
            manifest = self.manifest()  # the first writer's
            assert manifest is not None
        there, here = manifest.isolation, self._own.isolation
        if (there == "shared") != (here == "shared"):
            raise DatastoreError(
                f"servers at {self.url} learn with isolation '{there}', not '{here}': set that one, or choose another "
                "URL"
            )
        manifest.admitting(f"{self.url}/learnt", self._own, alone=True)
        with reporting("write", self._cached):
            self._cached.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            manifest.write(self._cached)
        key, self.key = self.key, bytes.fromhex(manifest.key)
        if key not in (None, self.key):  # text learnt under another key has no tenant
            self.pending.erase(Erasure())
        built: Snapshot = ()
        if MANIFEST in self._above.names():
            copy, own = local_copy(self.url), self._own
            built = Datastore.open(copy, vocab_size=own.vocab_size, fingerprint=own.fingerprint, verify=False).snapshot
        self._reached = True
        return built

    def manifest(self) -> LiveManifest | None:
        """Return the manifest; None if no server has learnt at the URL. Raises DatastoreError: it is unreadable."""
        data = self._folder.get(MANIFEST)
        return None if data is None else LiveManifest.parse(data, f"{self.url}/learnt/{MANIFEST}")

    def forget(self, tenants: list[int | None], before: int | None) -> None:
        """Erase published documents of tenants (None: of all), before a time (ms since 1970; None: until this
        returns). Servers follow at their next poll; the URL has none of the documents when this returns."""
        # Until its next poll a server may still publish such documents; its clock may be ahead by as much.
        pause = 2 * POLL_SECONDS
        if before is None:
            now, newest = now_ms(), max((batch.newest for batch in self._list().batches), default=0)
            before = max(now + int(1000 * pause), min(newest + 1, now + _DAY))  # some clocks are far ahead
        self._erase([Erasure(tenant, before) for tenant in tenants], again_after=pause)

    def documents(self) -> list[Record]:
        found: dict[tuple[str, int], Record] = {}
        read = set[str]()
        while fresh := [batch for batch in self._list().batches if batch.name not in read]:
            for batch in fresh:
                documents = self._read(batch) or []  # none if it was rewritten meanwhile
                found |= {(batch.server, number): record for number, record in documents}
                read.add(batch.name)
        return [found[key] for key in sorted(found) if not self._covered(found[key])]

    def _pull(self, changes: Changes) -> Listing:
        listing, now = self._list(), now_ms()
        changes.erasures.extend(erasure for erasure in listing.erasures if erasure not in self._applied)
        if changes.erasures:
            self._open = []  # the server that erases rewrites this batch
        self._applied = {e for e in listing.erasures if e.before < now}  # the others also cover documents to come
        self._handled &= {batch.name for batch in listing.batches}
        fresh, room = [], 4 * self._max_tokens
        for batch in sorted(listing.batches, key=lambda batch: -batch.newest):
            if batch.name not in self._handled:
                room -= batch.size
                if room >= 0 and (self._until or batch.last > self._seen.get(batch.server, -1)):
                    fresh.append(batch)
                else:  # known by number, or too old to fit into memory
                    self._handled.add(batch.name)
        order = {batch.server: random.random() for batch in fresh}  # all get their turn, however long reading takes
        gone = set[str]()
        for batch in sorted(fresh, key=lambda batch: (order[batch.server], batch)):
            documents = None if batch.server in gone else self._read(batch)
            if documents is None:  # rewritten: wait for the next listing, also with later batches of its server
                gone.add(batch.server)
                continue
            last = self._seen.get(batch.server, -1)
            changes.records.extend(record for n, record in documents if n > last and not self._covered(record))
            if documents:  # a damaged batch has none
                self._seen[batch.server] = max(last, batch.last)
            if any(self._erased(record) for _, record in documents):  # its writer had not seen the erasure
                self._rewrite(batch, documents)
            self._handled.add(batch.name)  # last, so that a failed rewrite is tried again
        return listing

    def _send(self) -> None:
        """Publish: the newest batch grows until it is too large or spans too much time."""
        self._unsent = [document for document in self._unsent if not self._covered(document[1])]
        while self._unsent:
            n = self._fitting()
            if not n:
                self._open = []
                continue
            documents = self._open + self._unsent[:n]
            self._folder.put(*seal(self._server, documents))
            before, self._open = self._open, documents
            del self._unsent[:n]
            if before:
                self._folder.remove(seal(self._server, before)[0])

    def _fitting(self) -> int:
        size = sum(record.size for _, record in self._open)
        first = (self._open or self._unsent)[0][1].milliseconds
        for n, (_, record) in enumerate(self._unsent):
            size += record.size
            late = record.milliseconds - first > self._span or record.milliseconds // _DAY != first // _DAY
            if (n or self._open) and (late or size > _BATCH_TOKENS):
                return n
        return len(self._unsent)

    def _finish_erasures(self, listing: Listing) -> None:
        # Of expired documents, and of a killed `forget`.
        old = [batch.newest for batch in listing.batches if batch.oldest < self._oldest] if self._expiring else []
        if old:  # but no future documents if this host's clock is ahead
            erasure = Erasure(None, min(self._oldest, max(old) + 1))
            self._applied.add(erasure)
            listing = self._erase([erasure])
        self._expiring, now = False, time.monotonic()
        due = [name for name in listing.erasures.values() if name.endswith("due")]
        self._due = {name: self._due.get(name, now) for name in due}
        late = [name for name, since in self._due.items() if now - since > FINISH_SECONDS]
        if late:
            self._sweep(listing)
            self._mark_done(late)

    def _erase(self, erasures: list[Erasure], again_after: float = 0.0) -> Listing:
        """Announce erasures and remove covered documents, again after `again_after` seconds if set; return the last
        listing."""
        self._announce(erasures)
        self._sweep(listing := self._list())
        if again_after:
            time.sleep(again_after)
            self._sweep(listing := self._list())
        self._mark_done([name for erasure, name in listing.erasures.items() if erasure in erasures])
        return listing

    def _announce(self, erasures: list[Erasure]) -> None:
        for erasure in erasures:
            tenant = "all" if erasure.tenant is None else f"{erasure.tenant:016x}"
            self._folder.put(f"erased.{erasure.before}.{tenant}.due", b"\n")
        for other, name in self._list().erasures.items():
            covering = (e for e in erasures if e != other and e.before >= other.before)
            if any(e.tenant in (None, other.tenant) for e in covering):
                self._folder.remove(name)

    def _mark_done(self, names: list[str]) -> None:
        for name in names:
            if name.endswith("due"):
                self._folder.put(name.removesuffix("due") + "done", b"\n")
                self._folder.remove(name)

    def _sweep(self, listing: Listing) -> None:
        for batch in listing.batches:
            covering = [e for e in listing.erasures if e.before > batch.oldest]
            if any(e.tenant is None and e.before > batch.newest for e in covering):
                self._folder.remove(batch.name)
            elif covering:
                self._rewrite(batch, self._read(batch))
        for part in listing.parts:
            self._folder.remove(part)

    def _rewrite(self, batch: Batch, documents: list[Document] | None) -> None:
        """Replace a batch by one without erased documents. A damaged one is removed: its tenants are unknown."""
        kept = [document for document in documents or () if not self._erased(document[1])]
        if not documents or len(kept) < len(documents):
            if kept:
                self._folder.put(*seal(batch.server, kept))
            self._folder.remove(batch.name)

    def _covered(self, record: Record) -> bool:
        return record.milliseconds < self._oldest or self._erased(record)

    def _erased(self, record: Record) -> bool:
        return record.milliseconds < max(self._until.get(None, 0), self._until.get(record.tenant, 0))

    def _read(self, batch: Batch) -> list[Document] | None:  # empty: it is damaged; None: it was removed
        data = self._folder.get(batch.name)
        try:
            return None if data is None else unseal(batch, data, self._own.vocab_size)
        except DatastoreError as error:
            logger.error("freedraft: %s: %s; it is left out", self.url, error)
            return []

    def _list(self) -> Listing:
        """List the URL and apply its erasures: from then on erased documents are not taken, published or kept."""
        listing = Listing.of(self._folder.names())
        for name in sorted(listing.strange - self._strange):
            logger.error("freedraft: %s/learnt/%s is not a file of freedraft: ignored", self.url, name[:200])
        self._strange, self._until = listing.strange, {}
        for erasure in listing.erasures:
            self._until[erasure.tenant] = max(erasure.before, self._until.get(erasure.tenant, 0))
        return listing
