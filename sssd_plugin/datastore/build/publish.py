"""`AtomicPublish`: a directory that appears under its name only when it is whole."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import secrets
import shutil
from pathlib import Path

from freedraft.files import FileLock, fsync_folder
from sssd_plugin.datastore.disk.format import LIVE, MANIFEST
from sssd_plugin.datastore.errors import DatastoreError, reporting

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100


class AtomicPublish:
    """A temporary sibling of `target`, locked while its builder lives, renamed to `target` at the end.

    Whenever the builder stops, even by SIGKILL, `target` is absent (or what it was) or whole. What a killed builder
    leaves is a hidden sibling; the next build of the same target removes it.

    Args:
        target: the directory to publish; its parents are made.
        replace: whether a datastore at `target` may be replaced.

    Raises:
        DatastoreError: `target` exists and may not be replaced or is no datastore, or the disk refuses.
    """

    def __init__(self, target: Path, *, replace: bool = False) -> None:
        # Resolved, so that replacing through a symbolic link replaces what it points to, on that disk.
        self.target = target.resolve()
        self.replace, self._prefix = replace, f".{self.target.name}.building-"
        self._check_target()
        with reporting("write", self.target.parent):
            self.target.parent.mkdir(parents=True, exist_ok=True)
            self._remove_stale()
            self.path, self._lock = self._create()

    def publish(self) -> None:
        """Rename to the target, everything on disk."""
        self._check_target()
        with reporting("write", self.target):
            for directory in [*(p for p in self.path.iterdir() if p.is_dir()), self.path]:
                fsync_folder(directory)
            if self.target.exists() and any(self.target.iterdir()):
                _exchange(self.path, self.target)
                shutil.rmtree(self.path, ignore_errors=True)
            else:
                self.path.rename(self.target)
            fsync_folder(self.target.parent)
        self._lock.release()

    def discard(self) -> None:
        """Remove the temporary directory."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()

    def _check_target(self) -> None:
        with reporting("read", self.target):
            if not self.target.exists():
                return
            if not self.target.is_dir():
                raise DatastoreError(f"{self.target} is a file: choose the path of a new directory for the datastore")
            if not any(self.target.iterdir()):
                return
            if not self.replace:
                raise DatastoreError(f"{self.target} exists: choose another path, or give --force to replace it")
            # Even by force: never anything but a datastore.
            if not (self.target / MANIFEST).is_file():
                raise DatastoreError(
                    f"{self.target} is not a datastore (no {MANIFEST}), so it is not replaced: "
                    f"choose another path, or remove it yourself"
                )
            if (self.target / LIVE).exists():
                raise DatastoreError(
                    f"{self.target} holds what was learnt while serving, which replacing it would lose: "
                    f"choose another path, or move {self.target / LIVE} away"
                )

    def _create(self) -> tuple[Path, FileLock]:
        while True:
            path = self.target.parent / f"{self._prefix}{secrets.token_hex(4)}"
            path.mkdir(mode=0o700)
            # Another builder may take the new directory for a dead builder's until it is locked.
            with contextlib.suppress(FileNotFoundError):
                lock = FileLock(path, wait=True)
                if path.exists():
                    return path, lock
                lock.release()

    def _remove_stale(self) -> None:
        for path in self.target.parent.glob(f"{glob.escape(self._prefix)}*"):
            with contextlib.suppress(OSError):  # its builder lives
                lock = FileLock(path)
                if lock.enforced:  # else nobody can tell who is dead
                    shutil.rmtree(path, ignore_errors=True)
                lock.release()


def _exchange(new: Path, old: Path) -> None:
    """Swap two directories atomically where the system can; else there is a moment without `old`."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is not None:
        paths = (_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old))
        if renameat2(*paths, ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
            return
    aside = new.with_name(f"{new.name}.old")
    old.rename(aside)
    new.rename(old)
    aside.rename(new)
