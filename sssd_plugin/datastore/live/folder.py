"""The folder of a live datastore: its manifest, and the lock of its one writer."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, Field

from freedraft.files import FileLock
from sssd_plugin.datastore.disk.manifest import ChecksummedManifest
from sssd_plugin.datastore.errors import DatastoreError, reporting

logger = logging.getLogger("freedraft.datastore")

MANIFEST = "manifest.json"
LOCK = "lock"


class SegmentEntry(BaseModel, frozen=True):
    """A segment; its size in bytes and its tokens, separators included, are recorded once it is full."""

    name: Annotated[str, Field(pattern=r"^\d{6,}\.seg$")]
    size: int | None = None
    tokens: int = 0


def segment_name(number: int) -> str:
    return f"{number:06d}.seg"


class LiveManifest(ChecksummedManifest, frozen=True):
    """What the folder holds.

    Attributes:
        key: of the digests that stand for tenants' names, in hex.
        next: number of the next segment.
        segments: oldest first; the last one is being appended to.
    """

    DESCRIBES: ClassVar[str] = "a live datastore"
    REMEDY: ClassVar[str] = "remove the folder to start anew"
    ALTERNATIVE: ClassVar[str] = "choose another datastore"

    format: Literal["freedraft-live"] = "freedraft-live"
    format_version: Literal[1] = 1
    vocab_size: int
    fingerprint: str | None = None
    key: Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
    next: int = 1
    segments: tuple[SegmentEntry, ...] = ()

    @classmethod
    def of(cls, folder: Path) -> LiveManifest | None:
        """Return the manifest of a live folder; None if nothing was learnt there.

        Raises:
            DatastoreError: see `ChecksummedManifest.read`; it is missing though there are segments.
        """
        path = folder / MANIFEST
        with reporting("read", path):
            if path.exists():
                return cls.read(path)
            if folder.is_dir() and any(folder.glob("*.seg")):
                raise DatastoreError(f"{path} is missing though there are segments: restore it, or {cls.REMEDY}")
        return None

    def check_fits(self, folder: Path, vocab_size: int, fingerprint: str | None) -> None:
        """Raise `DatastoreError` unless what the folder holds was learnt with this model's tokenizer."""
        other = self.fingerprint is not None and fingerprint is not None and self.fingerprint != fingerprint
        if other or self.vocab_size > vocab_size:
            raise DatastoreError(
                f"{folder} was learnt with another model's tokenizer: choose another datastore, or remove this folder"
            )


def lock_writer(folder: Path) -> FileLock | None:
    """Take the writer's lock of a live folder; None if another process has it.

    Raises:
        DatastoreError: the disk refuses.
    """
    with reporting("write", folder / LOCK):
        try:
            lock = FileLock(folder / LOCK, create=True)
        except BlockingIOError:
            return None
    if not lock.enforced:
        logger.warning("freedraft: %s is on a file system without locks: see that only one server writes it", folder)
    return lock
