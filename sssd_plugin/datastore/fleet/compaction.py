"""`compact`: the batches of a fleet become sub-indices, in a new generation of its bucket; `announce` erases.

Small sub-indices are merged into larger ones, as in `live.tenants`. What is erased, too old or there twice is left out,
and sub-indices that hold such documents are written anew.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from freedraft.compiled import compiled
from sssd_plugin.datastore.build.memory import SORT_BYTES, resident_bytes, sub_index_memory
from sssd_plugin.datastore.build.sorting import Sorter
from sssd_plugin.datastore.disk.bucket import Bucket, Generation
from sssd_plugin.datastore.disk.checksum import FileEntry, write_array
from sssd_plugin.datastore.disk.format import (
    ConsumedEntry,
    ErasureEntry,
    Isolation,
    LearntEntry,
    Manifest,
    Role,
    SubIndexEntry,
    TokenizerEntry,
    file_name,
    read_manifest,
)
from sssd_plugin.datastore.disk.sections import LearntSubIndex, learnt_sub_indices, order_of, tables_of
from sssd_plugin.datastore.errors import DatastoreError
from sssd_plugin.datastore.fleet.batch import unseal
from sssd_plugin.datastore.index.sub_index import PAD, SEPARATOR, SPARSE_STEP, direct_buckets
from sssd_plugin.datastore.index.suffix_sort import fill_sparse, fill_starts, sort_into
from sssd_plugin.datastore.records import Erasure, Record, in_parts, keep_shares, now_ms

logger = logging.getLogger("freedraft.datastore")

FACTOR = 4
MAX_LEARNT = 4
"""Sub-indices smaller than half of the largest possible, beyond which the smallest are merged, whatever their sizes."""
_TRIES = 20
_CONSUMED_SECONDS = 86400.0
_AGE_STEPS = 32


@dataclass(frozen=True, slots=True)
class Compacted:
    """What a compaction did: documents that are new, sub-indices and tokens that there are now, and bytes sent."""

    documents: int
    sub_indices: int
    tokens: int
    sent: int


def start(
    vocab_size: int, tokenizer: TokenizerEntry | None, isolation: Isolation, previous: Manifest | None
) -> Manifest:
    """Return the first manifest of a fleet, over a store that was built, if there is one."""
    learnt = LearntEntry(isolation=isolation, key=secrets.token_hex(16))
    built = previous.sub_indices if previous else ()
    vocab_size, tokenizer = (previous.vocab_size, previous.tokenizer) if previous else (vocab_size, tokenizer)
    return Manifest(vocab_size=vocab_size, tokenizer=tokenizer, sub_indices=built, learnt=learnt, requires=("learnt",))


def announce(bucket: Bucket, erasures: Sequence[Erasure]) -> None:
    """Let the replicas forget; the texts go with the next `compact`.

    Args:
        erasures: with a time each, since what is learnt later stays.

    Raises:
        DatastoreError: nothing was learnt there, or it is out of reach.
    """
    entries = tuple(
        ErasureEntry(tenant=e.tenant.hex() if e.tenant is not None else None, before=e.before)
        for e in erasures
        if e.before is not None
    )
    for _ in range(_TRIES):
        generation, _, manifest, learnt = newest(bucket)
        learnt = learnt.model_copy(update={"erasures": _joined(learnt.erasures + entries)})
        if bucket.publish(_next(manifest, learnt), generation.number + 1):
            return
    raise DatastoreError(f"{bucket.url} changes all the time: try again later")


def compact(
    bucket: Bucket,
    sorter: Sorter,
    *,
    memory: int,
    max_age: float | None = None,
    max_tokens: int | None = None,
) -> Compacted | None:
    """Make the next generation; None if there is nothing to do.

    Args:
        memory: bytes that this process may use.
        max_age: seconds after which a document is left out.
        max_tokens: of all tenants; beyond it who holds most loses its oldest documents.

    Raises:
        DatastoreError: nothing was learnt there, it is out of reach, or the disk of this host refuses.
    """
    for _ in range(_TRIES):
        generation = bucket.newest()
        try:
            done = _Compaction(bucket, sorter, memory, max_age, max_tokens).run()
        except DatastoreError:
            if bucket.newest() == generation:
                raise
            continue  # somebody else has removed what it was reading
        if done is not False:
            return done
    raise DatastoreError(f"{bucket.url} changes all the time: let one process compact it")


def newest(bucket: Bucket) -> tuple[Generation, Path, Manifest, LearntEntry]:
    """Return what a fleet has learnt: a generation, its store on this host, and what its manifest says.

    Raises:
        DatastoreError: nothing, or it is out of reach.
    """
    found = bucket.fetch_newest()
    if found is not None:
        manifest = read_manifest(found[1])
        if manifest.learnt is not None:
            return *found, manifest, manifest.learnt
    raise DatastoreError(f"no fleet learns at {bucket.url}: correct the URL, or start a server that learns there")


def to_merge(sizes: Sequence[int], size: int, limit: int) -> list[int]:
    """Return which sub-indices to merge with new documents.

    Args:
        sizes: of the sub-indices, in tokens.
        size: of what is new.
        limit: of a sub-index; from half of it on one is left as it is.
    """
    small = sorted((i for i, n in enumerate(sizes) if n < limit // 2), key=lambda i: -sizes[i])
    merged = []
    while small and (sizes[small[-1]] < FACTOR * size or len(small) >= MAX_LEARNT):
        merged.append(small.pop())
        size += sizes[merged[-1]]
    return merged


class _Compaction:
    """One attempt, which fails if somebody else makes the next generation first."""

    def __init__(
        self, bucket: Bucket, sorter: Sorter, memory: int, max_age: float | None, max_tokens: int | None
    ) -> None:
        self.bucket, self.sorter, self.max_tokens = bucket, sorter, max_tokens
        self.generation, self.path, self.manifest, self.learnt = newest(bucket)
        limit = sub_index_memory(memory, sorts=sorter.in_memory, each=sorter.process_bytes) // SORT_BYTES
        room = max(1 << 16, (memory - resident_bytes()) // 32)  # documents, their copies and their order
        self.limit = min(limit, room)
        age = 0 if max_age is None else max_age * 1000
        self.before = now_ms() - int(age) if max_age else 0
        self.slack = int(age / _AGE_STEPS)

    def run(self) -> Compacted | Literal[False] | None:
        batches = self.bucket.batches()
        consumed = dict(self.learnt.consumed)
        fresh = [n for n, (replica, number) in batches.items()
                 if replica not in consumed or number >= consumed[replica].number]  # fmt: skip
        records = list(self._read(fresh, batches, consumed))
        entries = [entry for entry in self.manifest.sub_indices if entry.n_sections]
        subs = {
            entry.name: (entry, sub)
            for entry, sub in zip(entries, learnt_sub_indices(self.path, self.manifest), strict=True)
        }
        chosen = self._choose(list(subs.values()), sum(record.size for record in records))
        gone = {entry.name for group in chosen for entry in group}
        # What is sent from here on may be for the generation after ours, which somebody can make at once.
        others = self.bucket.others(self.manifest)
        if not fresh and not gone and not others:
            self.bucket.remove(batches)
            return None
        written: list[SubIndexEntry] = []
        with tempfile.TemporaryDirectory(prefix="freedraft-") as name:
            for number, group in enumerate(chosen):
                documents = [] if number else records
                documents = documents + [record for entry in group for record in subs[entry.name][1].records()]
                written += self._write(Path(name), number, self._kept(documents))
            for entry in written:
                self.bucket.upload(Path(name) / entry.name)
        ends = [e for e in self.learnt.erasures if e.before > self.before]
        learnt = self.learnt.model_copy(update={"consumed": consumed, "erasures": tuple(ends)})
        left = [entry for entry in self.manifest.sub_indices if entry.name not in gone]
        manifest = _next(self.manifest, learnt, tuple({entry.name: entry for entry in (*left, *written)}.values()))
        if not self.bucket.publish(manifest, self.generation.number + 1):
            return False
        self.bucket.remove(batches)  # what came since has another name
        self.bucket.remove({*others, *gone} - {entry.name for entry in manifest.sub_indices})
        self.bucket.remove_generations(self.generation.number + 1)
        learnt_subs = [entry for entry in manifest.sub_indices if entry.n_sections]
        tokens = sum(entry.n_tokens for entry in learnt_subs)
        return Compacted(len(records), len(learnt_subs), tokens, sum(entry.size for entry in written))

    def _read(
        self, fresh: list[str], batches: dict[str, tuple[str, int]], consumed: dict[str, ConsumedEntry]
    ) -> Iterator[Record]:
        """Read batches, and note them as consumed."""
        now = now_ms()
        replicas = {replica for replica, _ in batches.values()}
        for replica in [r for r, c in consumed.items() if r not in replicas and now - c.at > _CONSUMED_SECONDS * 1000]:
            del consumed[replica]
        erasures = self.learnt.forgotten
        for name in sorted(fresh):
            replica, number = batches[name]
            try:
                records, until = unseal(self.bucket.read(name), self.manifest.vocab_size)
            except DatastoreError as error:
                if type(error) is not DatastoreError:
                    raise
                logger.error("freedraft: %s/%s: %s; it is left out", self.bucket.url, name, error)
                records, until = [], 0
            before = consumed.get(replica)
            until = max(until, before.until if before else 0)
            consumed[replica] = ConsumedEntry(number=number + 1, until=until, at=now)
            for record in records:
                if not any(erasure.covers(record.tenant, record.milliseconds) for erasure in erasures):
                    yield record

    def _choose(self, subs: list[tuple[SubIndexEntry, LearntSubIndex]], n_new: int) -> list[list[SubIndexEntry]]:
        """Return the sub-indices to write anew: first those that become one with what is new, then those that stay
        apart, so that text of one age stays together."""
        entries = [entry for entry, _ in subs]
        if self.max_tokens is not None and n_new + sum(entry.n_tokens for entry in entries) > self.max_tokens:
            return [entries]
        stale = [entry for entry, sub in subs if sub.must_be_rewritten(self.before - self.slack)]
        others = [entry for entry in entries if entry not in stale]
        merged = to_merge([entry.n_tokens for entry in others], n_new, self.limit) if n_new else []
        return [[others[i] for i in merged], *([entry] for entry in stale)]

    def _kept(self, records: list[Record]) -> list[Record]:
        """Return the records in their order, each text of a tenant once, the newest, and no more than may be held."""
        isolated = self.learnt.isolation == "tenant"
        records = [record for record in records if record.milliseconds >= self.before]
        unique = {(r.tenant, hashlib.sha256(r.tokens.tobytes()).digest()): r for r in sorted(records, key=_time)}
        records = list(unique.values())
        if self.max_tokens is not None and sum(record.size for record in records) > self.max_tokens:
            held: Counter[bytes] = Counter()
            for record in records:
                held[record.tenant] += record.size
            room = keep_shares(held, self.max_tokens - self.max_tokens // 8)
            kept = []
            for record in sorted(records, key=_time, reverse=True):
                room[record.tenant] -= record.size
                if room[record.tenant] >= 0:
                    kept.append(record)
            records = kept
        return sorted(records, key=order_of if isolated else _time)

    def _write(self, folder: Path, group: int, records: list[Record]) -> list[SubIndexEntry]:
        """Write sub-indices, a tenant's documents in as few of them as possible."""
        isolated = self.learnt.isolation == "tenant"
        pending: list[tuple[SubIndexEntry, Path, Future[dict[Role, FileEntry]]]] = []
        entries: list[SubIndexEntry] = []

        def end_one() -> None:
            entry, path, files = pending.pop(0)
            entry = entry.model_copy(update={"files": entry.files | files.result()})
            path.rename(folder / entry.address)
            entries.append(entry.model_copy(update={"name": entry.address}))

        for number, part in enumerate(in_parts(records, self.limit, isolated)):
            if len(pending) > self.sorter.beside:
                end_one()
            pending.append(self._write_one(folder / f"part-{group}-{number}", part, isolated))
        while pending:
            end_one()
        return entries

    def _write_one(
        self, path: Path, records: list[Record], isolated: bool
    ) -> tuple[SubIndexEntry, Path, Future[dict[Role, FileEntry]]]:
        path.mkdir(mode=0o700)
        sections, documents = tables_of(records, isolated)
        parts = [part for record in records for part in (record.tokens, [SEPARATOR])]
        tokens = np.concatenate([*parts, np.full(PAD, SEPARATOR, np.int32)], dtype=np.int32)
        arrays: dict[Role, np.ndarray] = {
            "tokens": tokens, "sections": sections.view("<i4"), "documents": documents.view("<i4")
        }  # fmt: skip
        files = {role: write_array(path / file_name(role), array) for role, array in arrays.items()}
        n = len(tokens) - PAD
        direct = direct_buckets(self.manifest.vocab_size)
        ends = np.cumsum(sections["documents"].astype(np.int64) + sections["tokens"])
        sorting: Future[dict[Role, FileEntry]] = Future()
        order = sort_sections(tokens, ends, direct if 4 * n >= direct else 0)
        roles: tuple[Role, ...] = ("suffix_array", "bucket_starts", "sparse_index")
        sorting.set_result({r: write_array(path / file_name(r), array) for r, array in zip(roles, order, strict=True)})
        entry = SubIndexEntry(
            name=path.name, n_tokens=n - len(records), n_documents=len(records), max_token=int(tokens.max()),
            files=files, n_sections=len(sections),
        )  # fmt: skip
        return entry, path, sorting


@compiled(nogil=True)
def sort_sections(tokens, ends, direct):
    """Sort sections of a text, each for itself.

    Args:
        tokens: int32 [n + PAD], as for `sort_into`.
        ends: int64 [S], where each section ends; n the last.
        direct: ids that have a bucket; used where there is one section only.

    Returns:
        The suffix arrays of the sections, one after the other, in places of `tokens`: int32 [m]; `bucket_starts`: int32
        [direct + 1], or [1] where there are several sections; their sparse indices, one after the other: int32.
    """
    counts = np.zeros(len(ends), np.int64)
    begin, n_sparse = 0, 0
    for s in range(len(ends)):
        for i in range(begin, ends[s]):
            counts[s] += tokens[i] >= 0
        begin = ends[s]
        n_sparse += (counts[s] + SPARSE_STEP - 1) // SPARSE_STEP
    order, sparse = np.empty(counts.sum(), np.int32), np.empty(n_sparse, np.int32)
    starts = np.zeros(direct + 1 if len(ends) == 1 else 1, np.int32)
    fill_starts(tokens, starts)
    begin, at, at_sparse = 0, 0, 0
    for s in range(len(ends)):
        part = order[at : at + counts[s]]
        sort_into(tokens, begin, ends[s], part)
        fill_sparse(tokens, part, sparse[at_sparse:])
        begin, at = ends[s], at + counts[s]
        at_sparse += (counts[s] + SPARSE_STEP - 1) // SPARSE_STEP
    return order, starts, sparse


def _joined(erasures: Sequence[ErasureEntry]) -> tuple[ErasureEntry, ...]:
    """Return the erasures without those that others cover."""
    latest: dict[str | None, int] = {}
    for erasure in erasures:
        latest[erasure.tenant] = max(erasure.before, latest.get(erasure.tenant, erasure.before))
    of_all = latest.get(None)
    return tuple(
        ErasureEntry(tenant=tenant, before=before)
        for tenant, before in latest.items()
        if tenant is None or of_all is None or before > of_all
    )


def _next(manifest: Manifest, learnt: LearntEntry, subs: tuple[SubIndexEntry, ...] | None = None) -> Manifest:
    """Return the manifest with what changes."""
    kept = manifest.sub_indices if subs is None else subs
    return Manifest(
        vocab_size=manifest.vocab_size, tokenizer=manifest.tokenizer, sub_indices=kept, learnt=learnt,
        requires=("learnt",),
    )  # fmt: skip


def _time(record: Record) -> int:
    return record.milliseconds
