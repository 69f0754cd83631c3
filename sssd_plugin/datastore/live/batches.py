"""`Batch`: learnt documents in a write-once file at a URL.

    URL/learnt/manifest.json        tokenizer, isolation, and the key of tenants' numbers; that of the first writer
    URL/learnt/<day>.<server>.<last>.<oldest>.<newest>.<digest>    a batch: documents of one server
    URL/learnt/erased.<before>.<tenant>.due    an erasure; `.done` once no batch holds what it covers

The name of a batch has the day of its newest document, the largest number that its server gave to a document, times of
the oldest and the newest (ms), and a SHA-256.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import NamedTuple

import numpy as np

from sssd_plugin.datastore.disk.format import MANIFEST
from sssd_plugin.datastore.errors import DatastoreError
from sssd_plugin.datastore.records import Erasure, Record

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
    def of(cls, sizes: Mapping[str, int]) -> Listing:
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
