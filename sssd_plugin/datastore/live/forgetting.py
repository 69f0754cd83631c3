"""Erasing what was learnt."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from sssd_plugin.datastore.disk.format import LIVE
from sssd_plugin.datastore.errors import DatastoreError, reporting
from sssd_plugin.datastore.live.folder import LiveManifest, SegmentEntry, lock_writer
from sssd_plugin.datastore.live.records import Record, replace_segments, scan_segment


def forget(directory: Path, stays: Callable[[Record], bool]) -> tuple[int, int]:
    """Erase documents from the disk; nobody may be writing there.

    Args:
        directory: the store's.
        stays: says of each document whether it is kept.

    Returns:
        Documents and tokens erased.

    Raises:
        DatastoreError: nothing was ever learnt there, a writer lives, or the disk refuses.
    """
    folder = Path(directory) / LIVE
    if not folder.is_dir():
        raise DatastoreError(f"{directory} has learnt nothing (no {LIVE}): correct the path")
    lock = lock_writer(folder)
    if lock is None:
        raise DatastoreError(f"a server is writing {folder}: stop it first")
    try:
        manifest = LiveManifest.of(folder)
        if manifest is None:
            return 0, 0
        documents = tokens = 0
        parts: list[SegmentEntry | list[Record]] = []
        for entry in manifest.segments:
            records = scan_segment(folder / entry.name).records
            kept = [record for record in records if stays(record)]
            documents += len(records) - len(kept)
            tokens += sum(len(record.tokens) for record in records) - sum(len(record.tokens) for record in kept)
            if len(kept) == len(records):
                parts.append(entry)
            elif kept:
                parts.append(kept)
        with reporting("write", folder):
            if documents:
                replace_segments(folder, manifest, parts)
        return documents, tokens
    finally:
        lock.release()


def live_key(directory: Path) -> bytes | None:
    """The key of the digests of tenants' names; None if nothing was ever learnt there.

    Raises:
        DatastoreError: the manifest cannot be read.
    """
    manifest = LiveManifest.of(Path(directory) / LIVE)
    return bytes.fromhex(manifest.key) if manifest else None


def milliseconds(text: str) -> int:
    """Milliseconds since 1970 of an ISO date or time; UTC unless it says otherwise.

    Raises:
        DatastoreError: not a time.
    """
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise DatastoreError(f"{text!r} is not a time: write for instance 2026-01-31 or 2026-01-31T12:00") from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return int(moment.timestamp() * 1000)
