"""Atomic, durable writes, and locks between processes."""

import contextlib
import fcntl
import os
import secrets
from pathlib import Path


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of `data`; `os.write` may take less."""
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def fsync_folder(folder: Path) -> None:
    """Make the names in `folder` survive a crash; syncing a file covers its contents only."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_atomically(path: Path, data: bytes, *, mode: int = 0o600, durable: bool = True) -> None:
    """Create or replace `path` atomically: readers see either the old or the new contents. Raises OSError: the disk
    refuses; `path` is as it was, and no temporary file is left.

    Args:
        mode: permissions, less the umask.
        durable: whether to fsync before returning; a cache need not.
    """
    if path.exists() and not path.is_file():  # never replace a device or a pipe
        path.write_bytes(data)
        return
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.new")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            write_all(fd, data)
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    if durable:
        fsync_folder(path.parent)


class FileLock:
    """An exclusive lock between processes, on a file or a folder, until the process ends. On a file system without
    locks every process gets it, with `enforced` False. Raises BlockingIOError: another process holds it and `wait` is
    False; OSError: `path` cannot be opened."""

    def __init__(self, path: Path, *, create: bool = False, wait: bool = False) -> None:
        flags = os.O_RDWR | os.O_CREAT if create else os.O_RDONLY
        self._fd: int | None = os.open(path, flags | os.O_CLOEXEC, 0o600)
        self.enforced = True
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise
        except OSError:
            self.enforced = False

    def release(self) -> None:
        """Release the lock; may be called twice."""
        if self._fd is not None:
            with contextlib.suppress(OSError):  # closing does not unlock while a forked process has the file open
                fcntl.flock(self._fd, fcntl.LOCK_UN)
            os.close(self._fd)
            self._fd = None
