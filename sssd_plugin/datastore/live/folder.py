"""The folder of a live datastore: its manifest, and a lock shared by the processes of one host.

    STORE/live/lock             held by every process that learns there; names their host
    STORE/live/manifest.json    what the folder holds
    STORE/live/learnt.sqlite    the documents; see `log`

All files have mode 0600. Suffix arrays are not stored: sorting is faster than verifying a stored order.
"""

import contextlib
import fcntl
import os
import platform
import secrets
import time
from io import FileIO
from pathlib import Path
from typing import ClassVar, Literal, Self

from pydantic import Field

from sssd_plugin.datastore.disk.format import ChecksummedManifest, Digest, Isolation
from sssd_plugin.datastore.errors import DatastoreError, reporting

MANIFEST = "manifest.json"
LOCK = "lock"
FILE = "learnt.sqlite"
_WAIT_SECONDS = 30.0


class LiveManifest(ChecksummedManifest, frozen=True):
    DESCRIBES: ClassVar[str] = "a live datastore"
    REMEDY: ClassVar[str] = "remove the folder to start anew"
    ALTERNATIVE: ClassVar[str] = "choose another datastore"

    format: Literal["freedraft-live"] = "freedraft-live"
    format_version: Literal[1] = 1
    vocab_size: int
    fingerprint: str | None = None
    key: Digest = Field(default_factory=lambda: secrets.token_hex(16))  # of `tenant_number`
    isolation: Isolation  # narrowest isolation of all learnt text

    @classmethod
    def of(cls, folder: Path) -> Self | None:
        """Return the manifest of a live folder; None if nothing was learnt there. Raises DatastoreError: see
        `ChecksummedManifest.read`; or there are documents without a manifest."""
        path = folder / MANIFEST
        with reporting("read", path):
            if path.exists():
                return cls.read(path)
            if (folder / FILE).exists():
                raise DatastoreError(f"{path} is missing though {FILE} is there: restore it, or {cls.REMEDY}")
        return None

    def admitting(self, folder: Path | str, server: Self, alone: bool) -> Self:
        """Return the manifest after admitting a server that would write another one, alone or not. Raises
        DatastoreError: it is not admitted."""
        there, here, fingerprints = self.isolation, server.isolation, {self.fingerprint, server.fingerprint} - {None}
        if len(fingerprints) > 1 or self.vocab_size > server.vocab_size:
            raise DatastoreError(
                f"{folder} was learnt with another model's tokenizer: choose another datastore, or remove this folder"
            )
        if here == "shared" != there:
            raise DatastoreError(
                f"{folder} was learnt with isolation '{there}', and 'shared' would show it to everybody: set isolation "
                f"'{there}', choose another datastore, or run `freedraft datastore isolation {Path(folder).parent} "
                "shared --accept`"
            )
        if there == "shared" != here and not alone:
            raise DatastoreError(
                f"a server with isolation 'shared' learns in {folder}, and would draft for everybody from what this "
                "one learns: stop it first, or choose another path"
            )
        return self.model_copy(update={"isolation": here if there == "shared" else there})


class FolderLock(FileIO):
    """A lock shared by the processes of one host only; `alone`: no other process had it when this one took it. sqlite3
    needs locks of the file system, so without them this lock is refused. Raises DatastoreError: another host has the
    lock, the file system has no locks, or a disk error."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with reporting("write", folder / LOCK):
            super().__init__(folder / LOCK, "r+b", opener=lambda path, flags: os.open(path, flags | os.O_CREAT, 0o600))
        try:
            self.alone = self._take()
        except BaseException:
            self.close()
            raise

    def _take(self) -> bool:
        host, end = _host(), time.monotonic() + _WAIT_SECONDS
        while not self._flock(fcntl.LOCK_EX):
            if self._flock(fcntl.LOCK_SH):
                holder = os.pread(self.fileno(), 1000, 0)
                if holder == host:
                    return False
                name = holder.decode("utf-8", "replace").partition(" ")[2] or "another host"
                raise DatastoreError(
                    f"a process on {name} learns in {self._folder}: choose a datastore of this host's own"
                )
            if time.monotonic() > end:
                raise DatastoreError(f"another process has {self._folder / LOCK} for itself: try again later")
            time.sleep(0.02)
        with reporting("write", self._folder / LOCK):
            os.pwrite(self.fileno(), host, 0)
            self.truncate(len(host))
        return True

    def _flock(self, kind: int) -> bool:
        try:
            fcntl.flock(self, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise DatastoreError(
                f"{self._folder} is on a file system without locks ({error.strerror}), where two servers could destroy "
                "what is learnt: choose a datastore on another disk"
            ) from None
        return True

    def share(self) -> None:
        """Admit other processes of this host."""
        fcntl.flock(self, fcntl.LOCK_SH)


def _host() -> bytes:
    boot = Path("/proc/sys/kernel/random/boot_id")
    with contextlib.suppress(OSError):
        return f"{boot.read_text().strip()} {platform.node()}".encode()
    return f"- {platform.node()}".encode()
