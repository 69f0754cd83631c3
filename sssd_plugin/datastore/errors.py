"""`DatastoreError`: one clear line that names the file and the remedy."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

REBUILD = "build it again with `freedraft datastore build --force`"


class DatastoreError(ValueError):
    """A datastore that cannot be built or used. The message is one line: file, problem, remedy."""


_REMEDIES = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free some space or choose another disk"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "give this user access or choose another path"),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "correct the path"),
    errno.EROFS: "choose a path on a writable disk",
    errno.EMFILE: "raise the limit of open files (`ulimit -n`)",
}


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__


@contextmanager
def reporting(action: str, path: Path) -> Iterator[None]:
    """Turn an `OSError` into a `DatastoreError`; action: "read", "write"."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        remedy = _REMEDIES.get(error.errno or 0, "check the disk")
        raise DatastoreError(f"cannot {action} {where}: {error.strerror or error}; {remedy}") from error
