"""`LearntSubIndex`: a mapped sub-index of what a fleet learnt, in sections, one for each tenant.

`sections` holds, of each, the tenant's digest and the numbers of its documents and of their tokens, in the order of the
digests; `documents`, of each, the digest of whose it is, when it was learnt, and its tokens. Suffix array and sparse
index hold those of the sections, one after the other. Where tenants are not kept apart there is one section.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sssd_plugin.datastore.disk.format import Manifest, SubIndexEntry
from sssd_plugin.datastore.disk.store import map_arrays
from sssd_plugin.datastore.errors import REBUILD, DatastoreError
from sssd_plugin.datastore.index.sub_index import PAD, SPARSE_STEP
from sssd_plugin.datastore.records import Erasure, Record

SECTION = np.dtype([("tenant", "<i8", 2), ("documents", "<i4"), ("tokens", "<i4")])
DOCUMENT = np.dtype([("tenant", "<i8", 2), ("milliseconds", "<i8"), ("length", "<i4")])
NOBODY = bytes(16)
_NEVER = 1 << 62


class Section(NamedTuple):
    """What one tenant is drafted from.

    Attributes:
        row: int64 [TABLE_COLUMNS], of a `Snapshot.table`.
        n: tokens, separators included.
        oldest, newest: when documents of it were learnt, in ms since 1970.
        keeps: what keeps the addresses valid.
    """

    row: NDArray[np.int64]
    n: int
    oldest: int
    newest: int
    keeps: object


class LearntSubIndex:
    """One sub-index, mapped. What is damaged is refused.

    Args:
        path: of the store.
        erasures: a section that holds what they cover is not drafted from.

    Raises:
        DatastoreError: the files contradict each other.
    """

    def __init__(self, path: Path, entry: SubIndexEntry, erasures: Iterable[Erasure]) -> None:
        self._tokens, self._order, starts, self._sparse, sections, documents = map_arrays(path / entry.name, entry)
        self.sections, self.documents = sections.view(SECTION), documents.view(DOCUMENT)
        self._starts, self._erasures = starts, tuple(erasures)
        counts = self.sections["documents"].astype(np.int64), self.sections["tokens"].astype(np.int64)
        sparse = -(-counts[1] // SPARSE_STEP)
        self._ends = [np.cumsum(c) for c in (*counts, sparse)]
        right = entry.n_documents, entry.n_tokens, len(self._sparse)
        if any(c.min() < 0 for c in counts) or tuple(int(ends[-1]) for ends in self._ends) != right:
            raise DatastoreError(f"{path / entry.name} is corrupted: its sections do not agree; {REBUILD}")

    def section(self, digest: bytes) -> Section | None:
        """Return the section of a tenant, or the one of everybody (no digest); None if there is none to draft from."""
        at = self._find(digest)
        if at is None:
            return None
        (d0, d1), (m0, m1), (s0, _) = (_range(ends, at) for ends in self._ends)
        if covered(self.documents[d0:d1], self._erasures).any():
            return None  # until it is written without them
        addresses = (self._tokens.ctypes.data, self._order.ctypes.data + 4 * m0, self._starts.ctypes.data)
        sizes = len(self._tokens) - PAD, m1 - m0, len(self._starts) - 1
        row = np.array([*addresses, *sizes, self._sparse.ctypes.data + 4 * s0], np.int64)
        times = self.documents["milliseconds"][d0:d1]
        oldest, newest = (int(t) for t in (times.min(initial=_NEVER), times.max(initial=-_NEVER)))
        return Section(row, m1 - m0 + d1 - d0, oldest, newest, self)

    def records(self) -> Iterator[Record]:
        """Yield all documents that are not erased."""
        at = 0
        keep = ~self._erased()
        for document, kept in zip(self.documents, keep.tolist(), strict=True):
            length = int(document["length"])
            if kept:
                tenant = document["tenant"].tobytes()
                tokens = self._tokens[at : at + length]
                yield Record(b"" if tenant == NOBODY else tenant, int(document["milliseconds"]), tokens)
            at += length + 1

    def times(self) -> NDArray[np.int64]:
        """Return when the documents that are not erased were learnt, in ms since 1970."""
        return self.documents["milliseconds"][~self._erased()]

    def must_be_rewritten(self, before: int) -> bool:
        """Return whether it holds something erased, or from before a time."""
        return bool(covered(self.documents, [*self._erasures, Erasure(None, before)]).any())

    def _erased(self) -> NDArray[np.bool_]:
        return covered(self.documents, self._erasures)

    def _find(self, digest: bytes) -> int | None:
        tenants = self.sections["tenant"]
        wanted = np.frombuffer(digest or NOBODY, "<i8")
        low, high = (int(np.searchsorted(tenants[:, 0], wanted[0], side)) for side in ("left", "right"))
        for at in range(low, high):
            if tenants[at, 1] == wanted[1]:
                return at
        return None


def learnt_sub_indices(path: Path, manifest: Manifest) -> list[LearntSubIndex]:
    """Map the sub-indices of the store at `path` that were learnt."""
    erasures = manifest.learnt.forgotten if manifest.learnt else []
    return [LearntSubIndex(path, entry, erasures) for entry in manifest.sub_indices if entry.n_sections]


def tables_of(records: list[Record], isolated: bool) -> tuple[NDArray[np.void], NDArray[np.void]]:
    """Return `sections` and `documents` of records, which must be in the order of their tenants where these are kept
    apart."""
    documents = documents_of(records)
    change = (documents["tenant"][1:] != documents["tenant"][:-1]).any(1) if isolated else np.zeros(len(records) - 1)
    first = np.flatnonzero(np.append(True, change))
    sections = np.zeros(len(first), SECTION)
    sections["tenant"] = documents["tenant"][first] if isolated else 0
    sections["documents"] = np.diff(np.append(first, len(documents)))
    sections["tokens"] = np.add.reduceat(documents["length"], first)
    return sections, documents


def documents_of(records: list[Record]) -> NDArray[np.void]:
    """Return the table of records (`DOCUMENT` [d])."""
    documents = np.zeros(len(records), DOCUMENT)
    digests = b"".join(record.tenant or NOBODY for record in records)
    documents["tenant"] = np.frombuffer(digests, "<i8").reshape(-1, 2)
    documents["milliseconds"] = [record.milliseconds for record in records]
    documents["length"] = [len(record.tokens) for record in records]
    return documents


def order_of(record: Record) -> tuple[int, int, int]:
    """Return what records are sorted by: the tenant, as `LearntSubIndex.section` looks for it, and the time."""
    first, second = np.frombuffer(record.tenant or NOBODY, "<i8").tolist()
    return first, second, record.milliseconds


def covered(documents: NDArray[np.void], erasures: Iterable[Erasure]) -> NDArray[np.bool_]:
    """Return which documents (`DOCUMENT`) are erased: bool [d]."""
    gone = np.zeros(len(documents), bool)
    for erasure in erasures:
        this = np.ones(len(documents), bool)
        if erasure.before is not None:
            this &= documents["milliseconds"] < erasure.before
        if erasure.tenant is not None:
            this &= (documents["tenant"] == np.frombuffer(erasure.tenant, "<i8")).all(1)
        gone |= this
    return gone


def _range(ends: NDArray[np.int64], at: int) -> tuple[int, int]:
    return (int(ends[at - 1]) if at else 0), int(ends[at])
