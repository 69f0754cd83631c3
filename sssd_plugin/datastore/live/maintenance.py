"""Maintenance of a live folder or URL from outside, with or without servers learning there."""

import contextlib
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from freedraft.tenants import tenant_number
from sssd_plugin.datastore.disk.format import LIVE, MAX_VOCAB_SIZE, Isolation
from sssd_plugin.datastore.errors import DatastoreError, reporting
from sssd_plugin.datastore.index.sub_index import SEPARATOR
from sssd_plugin.datastore.live.document_file import UnreadableFileError
from sssd_plugin.datastore.live.exchange import Exchange
from sssd_plugin.datastore.live.folder import FILE, LOCK, MANIFEST, FolderLock, LiveManifest
from sssd_plugin.datastore.live.log import Log
from sssd_plugin.datastore.records import FOREVER, Erasure

_FILES = FILE, f"{FILE}-journal", f"{FILE}-wal"


def end_of(before: str | None) -> int | None:
    """Return an ISO date or time (default: UTC) in ms since 1970. Raises DatastoreError: not a time."""
    if before is None:
        return None
    try:
        moment = datetime.fromisoformat(before)
    except ValueError:
        raise DatastoreError(f"{before!r} is not a time: write for instance 2026-01-31 or 2026-01-31T12:00") from None
    return int((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)


def forget(place: Path | str, tenants: Sequence[str] = (), before: int | None = None) -> str:
    """Erase documents learnt in the directory of a store or at a URL, and return the result in words: those of these
    tenants (none: of all), from before a time (ms since 1970; None: until this returns), and all damaged ones, since
    their tenants are unknown. Servers that learn there forget them, too; those at a URL at their next poll. Raises
    DatastoreError: nothing was ever learnt there, another host learns there, it is unreachable, or a disk error."""
    if "://" in str(place):
        exchange, manifest = _exchange(str(place))
        exchange.forget(_numbers(manifest, tenants), before)
        return "forgotten; servers that learn there follow when they look next"
    folder, manifest = _learnt(Path(place))
    documents = tokens = 0
    with FolderLock(folder) as lock:
        try:
            with contextlib.closing(Log(folder, lock, manifest)) as log:
                until = FOREVER if before is None else before
                documents, tokens = log.erase(*(Erasure(number, until) for number in _numbers(manifest, tenants)))
                log.end_erasures(alone=True) if lock.alone else log.file.compact()
        except UnreadableFileError as error:
            if not lock.alone:
                raise DatastoreError(f"{error} (stop the servers that learn there before)") from None
            with reporting("write", folder / FILE):
                for name in _FILES:
                    (folder / name).unlink(missing_ok=True)
        servers = "" if lock.alone else "; servers that learn there follow within a second"
    return f"{documents:,} documents, {tokens:,} tokens forgotten{servers}"


def verify_live(directory: Path, erased: Sequence[str] = ()) -> str | None:
    """Check learnt documents, and that no byte of the files names these tenants; return the result in a few words, None
    if nothing was ever learnt. Raises DatastoreError: the first problem, with its remedy."""
    if LiveManifest.of(Path(directory) / LIVE) is None:
        return None
    folder, manifest = _learnt(directory)
    with FolderLock(folder) as lock:
        strange = {entry.name for entry in folder.iterdir()} - {LOCK, MANIFEST, *_FILES}
        if strange:
            raise DatastoreError(f"{folder / min(strange)} does not belong to a live datastore: remove it")
        with contextlib.closing(Log(folder, lock, manifest)) as log:
            documents, damaged = log.file.check()
            numbers = [tenant_number(log.key, name).to_bytes(8, "big").lstrip(b"\0") for name in erased]
        if damaged:
            raise DatastoreError(
                f"{folder / FILE}: {damaged} documents are damaged: run `freedraft datastore forget {directory} "
                "--before 1970-01-02`, which removes damaged documents and keeps all else"
            )
        with reporting("read", folder / FILE):
            content = b"".join(path.read_bytes() for name in _FILES if (path := folder / name).exists())
        if any(number in content for number in numbers):
            raise DatastoreError(
                f"{folder / FILE} still names this tenant: run `freedraft datastore forget`; if you just did and a "
                "server is running, look again in a minute"
            )
    return f"{documents:,} documents were learnt and are whole"


def export(place: str, out: Path, tenants: Sequence[str], *, accept: bool = False) -> tuple[int, int]:
    """Write documents learnt in the directory of a store or at a URL, of these tenants (none: of all), as token ids
    with a separator after each; return the numbers of documents and tokens. Raises DatastoreError: nothing was learnt,
    tenants were kept apart (unless `accept`), or a file cannot be read or written."""
    if "://" in place:
        exchange, manifest = _exchange(place)
        records = exchange.documents()
    else:
        folder, manifest = _learnt(Path(place))
        with FolderLock(folder) as lock, contextlib.closing(Log(folder, lock, manifest)) as log:
            records = log.load()
    if manifest.isolation != "shared" and len(tenants) != 1 and not accept:
        raise DatastoreError(
            f"{place} keeps tenants apart, and who drafts from {out} sees all: name one with --tenants, or say --accept"
        )
    numbers = _numbers(manifest, tenants)
    texts = [record.tokens for record in records if not tenants or record.tenant in numbers]
    parts = [part for text in texts for part in (text, [SEPARATOR])]
    with reporting("write", out), out.open("xb") as file:
        np.save(file, np.concatenate([*parts, np.zeros(0)], dtype=np.int32, casting="unsafe"))
    return len(texts), sum(map(len, texts))


def accept_isolation(directory: Path, isolation: Isolation) -> Isolation:
    """Change the isolation of learnt text, where no server runs; return the former one."""
    folder, manifest = _learnt(directory)
    with FolderLock(folder) as lock:
        if not lock.alone:
            raise DatastoreError(f"a server learns in {folder}: stop it first")
        with reporting("write", folder / MANIFEST):
            manifest.model_copy(update={"isolation": isolation}).write(folder / MANIFEST)
    return manifest.isolation


def _learnt(directory: Path) -> tuple[Path, LiveManifest]:
    folder = Path(directory) / LIVE
    manifest = LiveManifest.of(folder)
    if manifest is None:
        raise DatastoreError(f"{directory} has learnt nothing: correct the path")
    return folder, manifest


def _numbers(manifest: LiveManifest, tenants: Sequence[str]) -> list[int | None]:
    key = bytes.fromhex(manifest.key)
    return [tenant_number(key, name) for name in tenants] or [None]


def _exchange(url: str) -> tuple[Exchange, LiveManifest]:
    exchange = Exchange(url, LiveManifest(vocab_size=MAX_VOCAB_SIZE, isolation="salt"))
    manifest = exchange.manifest()
    if manifest is None:
        raise DatastoreError(f"no server learns at {url}: correct the URL, or start a server that learns there")
    return exchange, manifest
