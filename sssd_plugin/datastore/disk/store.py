"""`Datastore`: a store on disk, opened read-only for drafting; `audit`: checks of its contents beyond checksums."""

from pathlib import Path
from typing import NamedTuple, Self

import numpy as np

from freedraft.compiled import compiled
from sssd_plugin.datastore.disk.checksum import check
from sssd_plugin.datastore.disk.format import MANIFEST, Manifest, Role, SubIndexEntry, digest, file_name, read_manifest
from sssd_plugin.datastore.errors import REBUILD, DatastoreError, reporting
from sssd_plugin.datastore.index.sub_index import SEPARATOR, SPARSE_STEP, Snapshot, SubIndex, before, fill_starts

SAMPLES = 100_000


class Datastore(NamedTuple):
    """An open datastore. Its arrays are memory maps: processes on a host share one copy in the page cache. They stay
    mapped as long as someone holds the snapshot."""

    path: Path
    manifest: Manifest
    snapshot: Snapshot

    @classmethod
    def open(
        cls, path: Path | str, *, vocab_size: int | None = None, fingerprint: str | None = None, verify: bool = True,
        sha256: str | None = None,
    ) -> Self:  # fmt: skip
        """Open the store at `path`. Raises DatastoreError: missing, truncated, corrupted, foreign or newer than this
        version reads.

        Args:
            vocab_size: the model's; every id of the store must be below it. None: not checked.
            fingerprint: of the model's tokenizer; must be the store's, if that records one. None: not checked.
            verify: read all files and check digests and numbers, so that compiled code can read them unchecked; sizes
                are always checked. A store must be verified before it is drafted from.
            sha256: the `digest` that the store must have. None: not checked.
        """
        path = Path(path)
        manifest = read_manifest(path)
        _check_fits(path, manifest, vocab_size, fingerprint)
        if sha256 is not None and (found := digest(path)) != sha256:
            raise DatastoreError(
                f"{path / MANIFEST} has the digest {found}, not {sha256}: restore the store, or correct the digest"
            )
        check(manifest.files(path), contents=verify)
        try:
            snapshot = tuple(_map(path / sub.name, sub) for sub in manifest.sub_indices)
        except ValueError as error:
            raise DatastoreError(f"{path} is corrupted ({error}): {REBUILD}") from None
        return cls(path, manifest, snapshot)


def _check_fits(path: Path, manifest: Manifest, vocab_size: int | None, fingerprint: str | None) -> None:
    other = manifest.tokenizer
    command = f"`freedraft datastore build {path} --force --tokenizer MODEL INPUT...`"
    if fingerprint is not None and other is not None and other.fingerprint != fingerprint:
        raise DatastoreError(
            f"{path / MANIFEST}: the store was built with another tokenizer ({other.name}, fingerprint "
            f"{other.fingerprint[:12]}, not {fingerprint[:12]}): build it with this model's, {command}"
        )
    if vocab_size is not None and manifest.max_token >= vocab_size:
        raise DatastoreError(
            f"{path / MANIFEST}: the store holds token ids up to {manifest.max_token}, the model's vocabulary has only "
            f"{vocab_size}: build it with this model's tokenizer, {command}"
        )


def _map(folder: Path, sub: SubIndexEntry) -> SubIndex:
    arrays = {}
    for role, entry in sub.files.items():
        file = folder / file_name(role)
        with reporting("map", file):
            arrays[role] = np.asarray(np.memmap(file, "<i4", "r")) if entry.size else np.zeros(0, np.int32)
    return SubIndex(**arrays)


def audit(store: Datastore, *, full: bool = False) -> None:
    """Check the counts, the tables and the suffix arrays in a store that was opened with `verify`. Raises
    DatastoreError: the first thing that is wrong, with its file. Needs a byte of memory per token of a sub-index.

    The order of the suffixes is checked on `SAMPLES` neighbours; with `full`, on all.
    """
    for entry, sub in zip(store.manifest.sub_indices, store.snapshot, strict=True):
        tokens, order = sub.tokens[: sub.n], sub.suffix_array
        seen, starts = tokens == SEPARATOR, np.zeros_like(sub.bucket_starts)
        counts = (int(seen.sum()), int(tokens.max(initial=SEPARATOR))) == (entry.n_documents, entry.max_token)
        suffixes = len(tokens) - np.count_nonzero(seen)
        for start in range(0, len(order), SAMPLES):  # numpy copies indices
            seen[order[start : start + SAMPLES]] = True
        fill_starts(sub.tokens, starts)
        sparse = sub.tokens[order[::SPARSE_STEP] + 1]
        unsorted = _first_unsorted(sub.tokens, order, 1 if full else max(1, len(order) // SAMPLES))
        buckets_agree, sparse_agrees = (starts == sub.bucket_starts).all(), (sparse == sub.sparse_index).all()
        facts: list[tuple[Role, bool, str]] = [
            ("tokens", counts, "document count or largest id differ from the manifest's"),
            ("tokens", not len(tokens) or tokens[-1] == SEPARATOR, "the last document is not closed"),
            ("bucket_starts", buckets_agree, "it does not agree with the tokens"),
            ("sparse_index", sparse_agrees, "it does not agree with the tokens and the suffix array"),
            ("suffix_array", len(order) == suffixes and bool(seen.all()), "it is not a permutation of the suffixes"),
            ("suffix_array", unsorted < 0, f"not sorted at entry {unsorted}"),
        ]
        for role, right, wrong in facts:
            if not right:
                raise DatastoreError(f"{store.path / entry.name / file_name(role)} is wrong: {wrong}; {REBUILD}")


@compiled(nogil=True)
def _first_unsorted(tokens, order, step):
    """Return the first of every `step`-th suffix that does not come before its successor, or -1."""
    for i in range(0, len(order) - 1, step):
        if before(tokens, order[i + 1], order[i], 0):
            return i
    return -1
