"""A sealed batch: documents of one replica in one file, with a checksum.

magic, SHA-256 of the rest, int64 [2]: number of documents, `until`; documents (`sections.DOCUMENT`); int32 tokens
"""

from __future__ import annotations

import hashlib

import numpy as np

from sssd_plugin.datastore.disk.sections import DOCUMENT, NOBODY, documents_of
from sssd_plugin.datastore.errors import DatastoreError
from sssd_plugin.datastore.records import Record

_MAGIC = b"freedraft batch\n"
_HEAD = len(_MAGIC) + 32


def seal(records: list[Record], until: int) -> bytes:
    """Return a batch of everything that a replica learnt before `until` (ms) and has not published."""
    tokens = [np.ascontiguousarray(record.tokens, "<i4").tobytes() for record in records]
    counts = np.array([len(records), until], "<i8").tobytes()
    body = b"".join([counts, documents_of(records).tobytes(), *tokens])
    return _MAGIC + hashlib.sha256(body).digest() + body


def unseal(data: bytes, vocab_size: int) -> tuple[list[Record], int]:
    """Return what `seal` was given.

    Raises:
        DatastoreError: damaged, or with ids that are none.
    """
    body = data[_HEAD:]
    if data[: len(_MAGIC)] != _MAGIC or data[len(_MAGIC) : _HEAD] != hashlib.sha256(body).digest():
        raise DatastoreError("a batch is damaged")
    n, until = np.frombuffer(body, "<i8", 2).tolist()
    documents = np.frombuffer(body, DOCUMENT, n, 16)
    tokens = np.frombuffer(body, "<i4", offset=16 + n * DOCUMENT.itemsize)
    ends = np.cumsum(documents["length"], dtype=np.int64)
    if n and (int(ends[-1]) != len(tokens) or documents["length"].min() <= 0):
        raise DatastoreError("a batch is damaged")
    if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size):
        raise DatastoreError("a batch holds ids beyond the vocabulary")
    digests = [document.tobytes() for document in documents["tenant"]]
    return [
        Record(b"" if digest == NOBODY else digest, milliseconds, part)
        for digest, milliseconds, part in zip(
            digests, documents["milliseconds"].tolist(), np.split(tokens, ends[:-1]), strict=True
        )
    ] if n else [], until
