"""`Datastore`: a store on disk, opened read-only for drafting."""

from __future__ import annotations

from pathlib import Path
from typing import Self

import numpy as np

from sssd_plugin.datastore.disk.checksum import check
from sssd_plugin.datastore.disk.format import MANIFEST, Manifest, SubIndexEntry, digest, file_name, read_manifest
from sssd_plugin.datastore.errors import REBUILD, DatastoreError, reporting
from sssd_plugin.datastore.index.sub_index import Snapshot, SubIndex


class Datastore:
    """An open datastore. Its arrays are memory maps: processes on a host share one copy in the page cache.

    Attributes:
        path: the directory.
        manifest: what it holds.
    """

    def __init__(self, path: Path, manifest: Manifest, snapshot: Snapshot) -> None:
        self.path = path
        self.manifest = manifest
        self._snapshot: Snapshot | None = snapshot

    @classmethod
    def open(
        cls,
        path: Path | str,
        *,
        vocab_size: int | None = None,
        fingerprint: str | None = None,
        verify: bool = True,
        sha256: str | None = None,
    ) -> Datastore:
        """Open the store at `path`.

        Args:
            vocab_size: the model's; every id of the store must be below it. None: not checked.
            fingerprint: of the model's tokenizer; must be the store's, if that records one. None: not checked.
            verify: read all files, compare their checksums, and see that compiled code can read them unchecked; sizes
                are always compared. What nobody has verified must not be drafted from.
            sha256: the `digest` that the store must have. None: not checked.

        Raises:
            DatastoreError: missing, truncated, corrupted, foreign or newer than this version reads.
        """
        path = Path(path)
        manifest = read_manifest(path)
        _check_fits(path, manifest, vocab_size, fingerprint)
        if sha256 is not None and (found := digest(path)) != sha256:
            raise DatastoreError(
                f"{path / MANIFEST} has the digest {found}, not {sha256}: restore the store, or correct the digest"
            )
        check(manifest.files(path), contents=verify, pinned=sha256 is not None)
        try:
            subs = [_map(path / sub.name, sub) for sub in manifest.sub_indices]
        except ValueError as error:  # only where nothing was verified
            raise DatastoreError(f"{path} is corrupted ({error}): {REBUILD}") from None
        return cls(path, manifest, Snapshot(subs))

    @property
    def snapshot(self) -> Snapshot:
        """The sub-indices, for the drafter; they stay mapped as long as someone holds the snapshot."""
        if self._snapshot is None:
            raise ValueError(f"the datastore {self.path} is closed")
        return self._snapshot

    @property
    def n_tokens(self) -> int:
        """Tokens of all documents, separators not counted."""
        return self.manifest.n_tokens

    def close(self) -> None:
        """Release the maps; may be called twice."""
        self._snapshot = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _check_fits(path: Path, manifest: Manifest, vocab_size: int | None, fingerprint: str | None) -> None:
    """Raise `DatastoreError` if the store at `path` was made for another tokenizer or a larger vocabulary."""
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
    arrays = []
    for role in sub.roles:
        file = folder / file_name(role)
        with reporting("map", file):
            arrays.append(np.asarray(np.memmap(file, "<i4", "r")) if sub.files[role].size else np.zeros(0, np.int32))
    return SubIndex(*arrays)
