"""`Exchange`: what servers at one URL learn from each other, in small files that are written once.

    URL/learnt/manifest.json        tokenizer, isolation, and the key of tenants' digests; that of the first writer
    URL/learnt/<day>.<server>.<last>.<oldest>.<newest>.<digest>    a batch: documents of one server
    URL/learnt/erased.<before>.<tenant>.due    an erasure; `.done` once no batch holds what it covers

The name of a batch describes its contents: the day of its newest document, the greatest number that the server gave to
one of them, times of the oldest and the newest (ms), and a SHA-256. So whoever writes a batch anew without erased
documents gives it the same name, readers leave out documents whose numbers they have had, and batches that are too old
are removed by name. One listing holds erasures and batches, so no reader takes a document that was erased before.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import random
import re
import secrets
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

import numpy as np

from freedraft.files import write_atomically
from sssd_plugin.datastore.disk.format import MANIFEST, MAX_VOCAB_SIZE, Isolation
from sssd_plugin.datastore.disk.remote import UnreachableError, cache_folder, local_copy, open_url, reaching
from sssd_plugin.datastore.disk.store import Datastore
from sssd_plugin.datastore.errors import DatastoreError, reporting
from sssd_plugin.datastore.index.sub_index import Snapshot
from sssd_plugin.datastore.live.folder import REACH, LiveManifest
from sssd_plugin.datastore.records import Changes, Erasure, PendingRecords, Record, now_ms

logger = logging.getLogger("freedraft.datastore")

POLL_SECONDS = 2.0
FINISH_SECONDS = 10.0
"""After which servers finish what a killed `forget` has begun."""
_CHECK_SECONDS = 10.0
_BATCH_TOKENS = 1 << 16
_MAX_BYTES = 64 << 20
_DAY = 86_400_000  # ms
_NOBODY = bytes(16)
_DOCUMENT = np.dtype([("number", "<i8"), ("milliseconds", "<i8"), ("tenant", "V16"), ("length", "<i8")])
_BATCH = re.compile(r"\d{4}-\d\d-\d\d\.([0-9a-f]{16})\.(\d{12})\.(\d{13})\.(\d{13})\.[0-9a-f]{32}")
_ERASED = re.compile(r"erased\.(\d{1,15})\.(all|[0-9a-f]{32})\.(due|done)")

Document = tuple[int, Record]
"""A document, after the number that its server gave to it."""


class Batch(NamedTuple):
    """A batch, as its name describes it."""

    server: str
    last: int
    oldest: int
    newest: int
    name: str
    size: int = 0


class Listing(NamedTuple):
    """All names below the URL: batches, names of erasures, and parts of files that killed processes have left."""

    batches: list[Batch]
    erasures: dict[Erasure, str]
    parts: list[str]


def seal(server: str, documents: list[Document]) -> tuple[str, bytes]:
    """Return the name and the contents of a batch: int64 n, n rows of `_DOCUMENT`, int32 tokens."""
    rows = [(number, r.milliseconds, r.tenant or _NOBODY, len(r.tokens)) for number, r in documents]
    texts = [np.ascontiguousarray(record.tokens, "<i4").tobytes() for _, record in documents]
    data = b"".join([np.int64(len(rows)).tobytes(), np.array(rows, _DOCUMENT).tobytes(), *texts])
    oldest, newest = min(row[1] for row in rows), max(row[1] for row in rows)
    day = datetime.fromtimestamp(newest / 1000, UTC)
    numbers = f"{rows[-1][0]:012d}.{oldest:013d}.{newest:013d}"
    return f"{day:%Y-%m-%d}.{server}.{numbers}.{hashlib.sha256(data).hexdigest()[:32]}", data


def unseal(batch: Batch, data: bytes, vocab_size: int) -> list[Document]:
    """Return what `seal` was given. Raises DatastoreError: the contents are damaged, not as the name describes them, or
    hold ids beyond the vocabulary."""
    with contextlib.suppress(ValueError, OverflowError, OSError):  # sizes and times that cannot be
        table = np.frombuffer(data, _DOCUMENT, max(1, int(np.frombuffer(data, "<i8", 1)[0])), 8)
        tokens = np.frombuffer(data, "<i4", offset=8 + table.nbytes).astype(np.int32)
        numbers, times, tenants, lengths = (table[name].tolist() for name in _DOCUMENT.names or ())
        whole = min(lengths) > 0 and sum(lengths) == len(tokens) and numbers == sorted(set(numbers))
        if whole and int(tokens.min()) >= 0 and int(tokens.max()) < vocab_size:
            texts = np.split(tokens, np.cumsum(lengths)[:-1])
            tenants = [b"" if tenant == _NOBODY else tenant for tenant in tenants]
            documents = list(zip(numbers, map(Record, tenants, times, texts), strict=True))
            if seal(batch.server, documents)[0] == batch.name:
                return documents
    raise DatastoreError(f"the batch {batch.name} is damaged, or holds ids beyond the vocabulary")


class Exchange:
    """One server's end of a URL, in the place of a `Log`. It is used by one thread, so a URL that is slow or down holds
    up no start and no request.

    Args:
        url: whatever fsspec opens and writes to; it need not answer yet.
        vocab_size, fingerprint: of the model and its tokenizer.
        isolation: all servers at the URL have the same one; "salt" and "strict" go together.
        max_tokens: of the newest documents that are read at first.
        max_age: seconds after which a document is erased; None for never.

    Attributes:
        key: of the digests of tenants; None until the URL was reached once on this host.
        pending: documents to publish.
    """

    def __init__(
        self,
        url: str,
        vocab_size: int = MAX_VOCAB_SIZE,
        fingerprint: str | None = None,
        isolation: Isolation = "salt",
        max_tokens: int = 1 << 24,
        max_age: float | None = None,
    ) -> None:
        self.url, self.pending = url.rstrip("/"), PendingRecords()
        self._vocab_size, self._fingerprint, self._isolation = vocab_size, fingerprint, isolation
        self._max_tokens, self._span = max_tokens, _DAY if max_age is None else min(_DAY, int(max_age * 1000 / 32))
        self._files, self._above = open_url(self.url)
        self._root, self._local = f"{self._above}/learnt", "file" in self._files.protocol
        self._cached = cache_folder() / f"{hashlib.sha256(self.url.encode()).hexdigest()[:32]}.json"
        self._server, self._number = secrets.token_hex(8), 0
        self._reached = self._expiring = False
        self._poll_at, self._oldest = 0.0, 0
        self._handled, self._strange = set[str](), set[str]()  # names of batches, and of other files
        self._seen = {self._server: 1 << 62}  # by server, the greatest number that was read
        self._until: dict[bytes | None, int] = {}  # by tenant, None for all, the time until which all is erased
        self._applied: set[Erasure] = set()
        self._due: dict[str, float] = {}  # when erasures that are due were first seen
        self._unsent: list[Document] = []
        self._open: list[Document] = []  # the batch that grows
        self._open_name = ""
        self.key: bytes | None = None
        with contextlib.suppress(DatastoreError):  # it was never reached from here
            self.key = bytes.fromhex(LiveManifest.read(self._cached).key)

    def load(self) -> list[Record]:
        """Return nothing: the URL is not waited for."""
        return []

    def sync(self, changes: Changes, retry: bool = True) -> None:
        """Publish new documents; add erasures and documents of others to `changes`. retry: whether to do so though it
        is not due."""
        if retry or time.monotonic() >= self._poll_at:
            self._poll_at = time.monotonic() + POLL_SECONDS * random.uniform(0.75, 1.25)  # servers do not ask at once
            if not self._reached:
                changes.built.extend(self.connect())
            listing = self._pull(changes)
            self._push()
            self._finish_erasures(listing)

    def expire(self, before: int) -> None:
        """Take no document that is older (ms), and erase such documents at the URL with the next `sync`."""
        self._oldest, self._expiring = before, True
        if self._open and self._open[0][1].milliseconds < before:
            self._open, self._open_name = [], ""

    def close(self) -> None:
        """Do nothing: what is left was published, or cannot be."""

    def check(self) -> None:
        """Refuse, before an engine starts, what `connect` refuses; that the URL does not answer within `_CHECK_SECONDS`
        is no reason."""
        errors: list[DatastoreError] = []

        def connect() -> None:
            try:
                self.connect()
            except DatastoreError as error:
                errors.append(error)

        thread = threading.Thread(target=connect, daemon=True)
        thread.start()
        thread.join(_CHECK_SECONDS)
        if errors and not isinstance(errors[0], UnreachableError):
            raise errors[0]
        if errors or thread.is_alive():
            reason = errors[0] if errors else f"{self.url} does not answer"
            logger.warning("freedraft: %s; the server starts, and tries again", reason)

    def connect(self) -> list[Snapshot]:
        """Read the manifest, or write the first one; return the built store at the URL, if there is one. Raises
        DatastoreError: the model, the server or this version does not fit what is there."""
        manifest = self.manifest()
        if manifest is None:
            if self._list().batches:
                raise DatastoreError(f"{self.url}/learnt/{MANIFEST} is missing though there are batches: restore it")
            settings = {"vocab_size": self._vocab_size, "fingerprint": self._fingerprint, "isolation": self._isolation}
            self._create(MANIFEST, LiveManifest.model_validate(settings).content())
            manifest = self.manifest()  # that of whoever was first
            assert manifest is not None
        manifest.check_fits(f"{self.url}/learnt", self._vocab_size, self._fingerprint, manifest.isolation)
        if REACH[manifest.isolation] != REACH[self._isolation]:
            raise DatastoreError(
                f"servers at {self.url} learn with isolation '{manifest.isolation}', not '{self._isolation}': set that "
                "one, or choose another URL"
            )
        with reporting("write", self._cached):
            self._cached.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            manifest.write(self._cached)
        key, self.key = self.key, bytes.fromhex(manifest.key)
        if key not in (None, self.key):  # what is learnt under another key is nobody's
            self.pending.erase(Erasure())
        built = []
        if MANIFEST in self._names(self._above):
            vocab_size, fingerprint = self._vocab_size, self._fingerprint
            store = Datastore.open(local_copy(self.url), vocab_size=vocab_size, fingerprint=fingerprint, verify=False)
            built.append(store.snapshot)
        self._reached = True
        return built

    def manifest(self) -> LiveManifest | None:
        """Return the manifest; None if no server has learnt at the URL. Raises DatastoreError: it cannot be read, or
        servers of an earlier version learnt there."""
        if any(re.fullmatch(r"manifest-\d+\.json", name) for name in self._names(self._above)):
            raise DatastoreError(
                f"{self.url} holds what servers of an earlier version learnt, which this version does not read: choose "
                "an empty URL; to keep the text, call `freedraft datastore export` of that version"
            )
        data = self._get(MANIFEST)
        return None if data is None else LiveManifest.parse(data, f"{self.url}/learnt/{MANIFEST}")

    def forget(self, erasures: list[Erasure]) -> None:
        """Erase published documents; each erasure has a time. Servers follow when they look next, and the URL holds
        none of the documents when this returns."""
        self._announce(erasures)
        self._sweep(self._list())
        time.sleep(2 * POLL_SECONDS)  # until all have looked, they publish as before
        self._sweep(listing := self._list())
        self._mark_done([name for erasure, name in listing.erasures.items() if erasure in erasures])

    def newest(self) -> int:
        """Return the time of the newest document at the URL, in ms since 1970."""
        return max((batch.newest for batch in self._list().batches), default=0)

    def documents(self) -> list[Record]:
        """Return all documents at the URL."""
        found: dict[tuple[str, int], Record] = {}
        read = set[str]()
        while fresh := [batch for batch in self._list().batches if batch.name not in read]:
            for batch in fresh:
                if (documents := self._read(batch)) is not None:  # else it was written anew meanwhile
                    found |= {(batch.server, number): record for number, record in documents}
                read.add(batch.name)
        return [found[key] for key in sorted(found) if not self._covered(found[key])]

    def _pull(self, changes: Changes) -> Listing:
        """Add what is new at the URL to `changes`."""
        listing, now = self._list(), now_ms()
        changes.erasures.extend(erasure for erasure in listing.erasures if erasure not in self._applied)
        if changes.erasures:
            self._open, self._open_name = [], ""  # whoever erases writes it anew
        self._applied = {e for e in listing.erasures if e.until < now}  # the others cover what comes
        self._handled &= {batch.name for batch in listing.batches}
        fresh, room = [], 4 * self._max_tokens
        for batch in sorted(listing.batches, key=lambda batch: -batch.newest):
            if batch.name not in self._handled:
                room -= batch.size
                if room >= 0 and (self._until or batch.last > self._seen.get(batch.server, -1)):
                    fresh.append(batch)
                else:  # known by number, or older than what fits into memory
                    self._handled.add(batch.name)
        order = {batch.server: random.random() for batch in fresh}  # all get their turn, however long reading takes
        gone = set[str]()
        for batch in sorted(fresh, key=lambda batch: (order[batch.server], batch)):
            documents = None if batch.server in gone else self._read(batch)
            if documents is None:  # written anew: the next listing has it, and later ones of its server must wait
                gone.add(batch.server)
                continue
            last = self._seen.get(batch.server, -1)
            kept = [document for document in documents if not self._covered(document[1])]
            changes.records.extend(record for number, record in kept if number > last)
            if documents:  # nothing is known of one that is damaged
                self._seen[batch.server] = max(last, batch.last)
            if any(self._erased(record) for _, record in documents):  # whoever wrote it had not seen the erasure
                self._rewrite(batch, documents)
            self._handled.add(batch.name)  # not before: where it could not be written anew, that is tried again
        return listing

    def _push(self) -> None:
        self._send()
        self._unsent = list(enumerate(self.pending.take(), self._number))
        self._number += len(self._unsent)
        self._send()

    def _send(self) -> None:
        """Publish: the newest batch grows until it is large, or would be too long in time."""
        self._unsent = [document for document in self._unsent if not self._covered(document[1])]
        while self._unsent:
            n = self._fitting()
            if not n:
                self._open, self._open_name = [], ""
                continue
            documents, before = self._open + self._unsent[:n], self._open_name
            name, data = seal(self._server, documents)
            self._put(name, data)
            self._open, self._open_name = documents, name
            del self._unsent[:n]
            if before:
                self._remove(before)

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
        """Erase what is too old, and what a `forget` that was killed has left."""
        old = [batch.newest for batch in listing.batches if batch.oldest < self._oldest] if self._expiring else []
        if old:  # and nothing that is still to be learnt, where this host's clock is ahead
            erasure = Erasure(None, min(self._oldest, max(old) + 1))
            self._applied.add(erasure)
            self._announce([erasure])
            self._sweep(listing := self._list())
            self._mark_done([name for e, name in listing.erasures.items() if e == erasure])
        self._expiring, now = False, time.monotonic()
        due = [name for name in listing.erasures.values() if name.endswith("due")]
        self._due = {name: self._due.get(name, now) for name in due}
        late = [name for name, since in self._due.items() if now - since > FINISH_SECONDS]
        if late:
            self._sweep(listing)
            self._mark_done(late)

    def _announce(self, erasures: list[Erasure]) -> None:
        for erasure in erasures:
            tenant = "all" if erasure.tenant is None else erasure.tenant.hex()
            self._put(f"erased.{erasure.before}.{tenant}.due", b"\n")
        for other, name in self._list().erasures.items():
            covering = (e for e in erasures if e != other and e.until >= other.until)
            if any(e.tenant in (None, other.tenant) for e in covering):
                self._remove(name)

    def _mark_done(self, names: list[str]) -> None:
        for name in names:
            if name.endswith("due"):
                self._put(name.removesuffix("due") + "done", b"\n")
                self._remove(name)

    def _sweep(self, listing: Listing) -> None:
        for batch in listing.batches:
            covering = [e for e in listing.erasures if e.until > batch.oldest]
            if any(e.tenant is None and e.until > batch.newest for e in covering):
                self._remove(batch.name)
            elif covering:
                self._rewrite(batch, self._read(batch))
        for part in listing.parts:
            self._remove(part)

    def _rewrite(self, batch: Batch, documents: list[Document] | None) -> None:
        """Replace a batch by one without what is erased. One that is damaged goes: nobody can tell whose it is."""
        kept = [document for document in documents or () if not self._erased(document[1])]
        if not documents or len(kept) < len(documents):
            if kept:
                self._put(*seal(batch.server, kept))
            self._remove(batch.name)

    def _covered(self, record: Record) -> bool:
        return record.milliseconds < self._oldest or self._erased(record)

    def _erased(self, record: Record) -> bool:
        return record.milliseconds < max(self._until.get(None, 0), self._until.get(record.tenant, 0))

    def _read(self, batch: Batch) -> list[Document] | None:
        """Return the documents of a batch, none if it is damaged; None if it is gone."""
        data = self._get(batch.name)
        try:
            return None if data is None else unseal(batch, data, self._vocab_size)
        except DatastoreError as error:
            logger.error("freedraft: %s: %s; it is left out", self.url, error)
            return []

    def _list(self) -> Listing:
        """Return what is there; from then on nothing that is erased is taken, published or kept."""
        listing, names = Listing([], {}, []), self._names(self._root)
        self._strange.intersection_update(names)
        for name, size in sorted(names.items()):
            if (match := _BATCH.fullmatch(name)) and size <= _MAX_BYTES:
                listing.batches.append(Batch(match[1], int(match[2]), int(match[3]), int(match[4]), name, size))
            elif match := _ERASED.fullmatch(name):
                tenant = None if match[2] == "all" else bytes.fromhex(match[2])
                listing.erasures[Erasure(tenant, int(match[1]))] = name
            elif name.startswith("."):
                listing.parts.append(name)
            elif name != MANIFEST and name not in self._strange:
                self._strange.add(name)
                logger.error("freedraft: %s/learnt/%s is no batch; it is left out", self.url, name[:200])
        self._until = {}
        for erasure in listing.erasures:
            self._until[erasure.tenant] = max(erasure.until, self._until.get(erasure.tenant, 0))
        return listing

    # Of the file system.

    def _names(self, folder: str) -> dict[str, int]:
        with reaching(self.url):
            self._files.invalidate_cache()
            try:
                entries = self._files.ls(folder, detail=True)
            except FileNotFoundError:
                return {}
            files = [entry for entry in entries if entry["type"] == "file"]
            return {str(entry["name"]).rpartition("/")[2]: int(entry["size"] or 0) for entry in files}

    def _get(self, name: str) -> bytes | None:
        """Return the contents of a file; None if it is missing."""
        with reaching(self.url):
            try:
                return bytes(self._files.cat_file(f"{self._root}/{name}"))
            except FileNotFoundError:
                return None

    def _put(self, name: str, data: bytes) -> None:
        """Write a file, which nobody sees in part."""
        with reaching(self.url):
            if not self._local:
                self._files.pipe_file(f"{self._root}/{name}", data)
                return
            Path(self._root).mkdir(parents=True, exist_ok=True)
            for last in (False, False, True):
                try:
                    return write_atomically(Path(self._root, name), data, mode=0o666)
                except FileNotFoundError:  # a sweep took the part for one that a killed process has left
                    if last:
                        raise

    def _create(self, name: str, data: bytes) -> None:
        """Write a file unless it exists."""
        part = f".{name}.{secrets.token_hex(4)}"
        try:
            if self._local:
                self._put(part, data)
            with reaching(self.url), contextlib.suppress(FileExistsError):
                if self._local:
                    os.link(Path(self._root, part), Path(self._root, name))
                else:
                    self._files.pipe_file(f"{self._root}/{name}", data, mode="create")
        except UnreachableError:  # drivers differ in what they raise where it exists
            if self._get(name) is None:
                raise
        if self._local:
            self._remove(part)

    def _remove(self, name: str) -> None:
        with reaching(self.url), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(f"{self._root}/{name}")
