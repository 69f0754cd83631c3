"""What is done to a live folder from outside, whether servers learn there or not: forgetting, checking, widening."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from sssd_plugin.datastore.disk.format import LIVE, Isolation
from sssd_plugin.datastore.errors import DatastoreError, reporting
from sssd_plugin.datastore.live.database import LearntDatabase, UnreadableFileError, problem
from sssd_plugin.datastore.live.folder import FILE, LOCK, MANIFEST, FolderLock, LiveManifest
from sssd_plugin.datastore.live.tenants import tenant_digest
from sssd_plugin.datastore.records import Erasure, Record

_JOURNAL = f"{FILE}-journal"


@dataclass(frozen=True, slots=True)
class Forgotten:
    """What was erased.

    Attributes:
        documents, tokens: on disk.
        alone: whether no server was learning there, which would follow within a second.
    """

    documents: int
    tokens: int
    alone: bool


def end_of(before: str | None) -> int | None:
    """Return an ISO date or time, UTC unless it says otherwise, in ms since 1970; None for None.

    Raises:
        DatastoreError: not a time.
    """
    if before is None:
        return None
    try:
        moment = datetime.fromisoformat(before)
    except ValueError:
        raise DatastoreError(f"{before!r} is not a time: write for instance 2026-01-31 or 2026-01-31T12:00") from None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def forget(directory: Path, tenants: Sequence[str] = (), before: int | None = None) -> Forgotten:
    """Erase learnt documents: of these tenants (none: of all), from before a time (None: of any). Servers of this host
    that learn there forget them, too. What is damaged is erased, too, because nobody can tell whose it is.

    Args:
        directory: the store's.
        tenants: keys, as of `freedraft.tenants.tenant_key`.
        before: ms since 1970.

    Raises:
        DatastoreError: nothing was ever learnt there, another host learns there, or the disk refuses.
    """
    folder, manifest = _learnt(directory)
    with FolderLock(folder) as locked:
        documents = tokens = 0
        path = folder / FILE
        try:
            with closing(LearntDatabase(path)) as database:
                digests: list[bytes | None] = [_digest(manifest, name) for name in tenants]
                for digest in digests or [None]:
                    gone = database.erase(Erasure(digest, before))
                    documents, tokens = documents + gone[0], tokens + gone[1]
                if locked.alone:
                    database.end_erasures(alone=True)
                else:
                    database.compact()
        except UnreadableFileError as error:
            if not locked.alone:
                raise DatastoreError(f"{error} (stop the servers that learn there before)") from None
            with reporting("write", path):
                path.unlink()
                (folder / _JOURNAL).unlink(missing_ok=True)
        except sqlite3.Error as error:
            raise DatastoreError(problem(path, error)) from None
        return Forgotten(documents, tokens, locked.alone)


def verify_live(directory: Path, erased: Sequence[str] = ()) -> str | None:
    """Check what was learnt, and that nothing is left of these tenants; None where nothing was ever learnt.

    Returns:
        What was found, in a few words.

    Raises:
        DatastoreError: the first thing that is wrong, with its remedy.
    """
    if LiveManifest.of(Path(directory) / LIVE) is None:
        return None
    folder, manifest = _learnt(directory)
    path = folder / FILE
    remedy = (
        f"run `freedraft datastore forget {directory} --before 1970-01-02`, which removes damaged documents, clears "
        "free space and keeps all else"
    )
    with FolderLock(folder):
        strange = {entry.name for entry in folder.iterdir()} - {FILE, LOCK, MANIFEST, _JOURNAL}
        if strange:
            raise DatastoreError(f"{folder / min(strange)} is no part of a live datastore: remove it")
        try:
            with closing(LearntDatabase(path)) as database:
                documents, damaged, left = database.check()
        except sqlite3.Error as error:
            raise DatastoreError(problem(path, error)) from None
        if damaged:
            raise DatastoreError(f"{path}: {damaged} documents are damaged: {remedy}")
        if left and erased:
            raise DatastoreError(f"{path} holds {left} bytes in its free space: {remedy}")
        with reporting("read", path):
            content = b"".join(file.read_bytes() for file in (path, folder / _JOURNAL) if file.exists())
        if any(_digest(manifest, name) in content for name in erased):
            raise DatastoreError(
                f"{path} still names this tenant: run `freedraft datastore forget`; if you just did and a server is "
                "running, look again in a minute"
            )
    return f"{documents:,} documents were learnt and are whole; {left or 'no'} bytes are left in free space"


def learnt_documents(directory: Path, tenants: Sequence[str] = ()) -> tuple[LiveManifest, list[Record]]:
    """Return what was learnt, of these tenants (none: of all).

    Raises:
        DatastoreError: nothing was ever learnt there, or it cannot be read.
    """
    folder, manifest = _learnt(directory)
    digests = {_digest(manifest, name) for name in tenants}
    with FolderLock(folder), closing(LearntDatabase(folder / FILE)) as database:
        try:
            records = database.read()[1]
        except sqlite3.Error as error:
            raise DatastoreError(problem(folder / FILE, error)) from None
    return manifest, [record for record in records if not digests or record.tenant in digests]


def accept_isolation(directory: Path, isolation: Isolation) -> Isolation:
    """Let what was learnt be seen as this isolation has it; return what it was before.

    Raises:
        DatastoreError: nothing was ever learnt there, a process learns there, or the disk refuses.
    """
    folder, manifest = _learnt(directory)
    with FolderLock(folder) as locked:
        if not locked.alone:
            raise DatastoreError(f"a server learns in {folder}: stop it first")
        with reporting("write", folder / MANIFEST):
            manifest.with_isolation(isolation).write(folder / MANIFEST)
    return manifest.isolation


def _learnt(directory: Path) -> tuple[Path, LiveManifest]:
    folder = Path(directory) / LIVE
    manifest = LiveManifest.of(folder)
    if manifest is None:
        raise DatastoreError(f"{directory} has learnt nothing: correct the path")
    return folder, manifest


def _digest(manifest: LiveManifest, name: str) -> bytes:
    return tenant_digest(bytes.fromhex(manifest.key), name)
