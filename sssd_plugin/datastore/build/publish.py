"""`AtomicPublish`: a directory that appears under its name only when it is complete."""

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


class AtomicPublish:
    """A temporary sibling of `target`, locked while its builder lives, renamed to `target` at the end: after a stop at
    any time, even by SIGKILL, `target` is absent (or unchanged) or complete, and the next build removes leftovers.
    Raises DatastoreError: `target` exists and may not be replaced, or is no datastore."""

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
        """Remove the directory if it was not published."""
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.release()

    def _check_target(self) -> None:
        """Refuse to replace anything but a datastore, even by force."""
        with reporting("read", self.target):
            if not self.target.exists() or (self.target.is_dir() and not any(self.target.iterdir())):
                return
            live = self.target / LIVE
            problems = [
                (not self.target.is_dir(), "is a file: choose the path of a new directory for the datastore"),
                (not self.replace, "exists: choose another path, or give --force to replace it"),
                (not (self.target / MANIFEST).is_file(), f"is not a datastore (no {MANIFEST}), so it is not replaced: "
                                                         "choose another path, or remove it yourself"),
                (live.exists(), "holds what was learnt while serving, which replacing it would lose: "
                                f"choose another path, or move {live} away"),
            ]  # fmt: skip
        for wrong, message in problems:
            if wrong:
                raise DatastoreError(f"{self.target} {message}")

    def _create(self) -> tuple[Path, FileLock]:
        while True:
            path = self.target.parent / f"{self._prefix}{secrets.token_hex(4)}"
            path.mkdir(mode=0o700)
            # Until it is locked, another builder may remove the new directory as a dead builder's.
            with contextlib.suppress(FileNotFoundError):
                lock = FileLock(path, wait=True)
                if path.exists():
                    return path, lock
                lock.release()

    def _remove_stale(self) -> None:
        for path in self.target.parent.glob(f"{glob.escape(self._prefix)}*"):
            with contextlib.suppress(OSError):  # its builder lives
                lock = FileLock(path)
                if lock.enforced:  # else dead builders cannot be detected
                    shutil.rmtree(path, ignore_errors=True)
                lock.release()


def _exchange(new: Path, old: Path) -> None:
    """Swap two directories, atomically if the system can; else `old` is absent for a moment."""
    cwd, exchange = -100, ctypes.c_uint(2)  # AT_FDCWD, RENAME_EXCHANGE
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is not None and renameat2(cwd, os.fsencode(new), cwd, os.fsencode(old), exchange) == 0:
        return
    aside = new.with_name(f"{new.name}.old")
    old.rename(aside)
    new.rename(old)
    aside.rename(new)
