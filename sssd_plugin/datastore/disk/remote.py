"""`local_copy`: the copy, on this host, of a store at a URL."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from freedraft.files import FileLock, fsync_folder, write_atomically
from sssd_plugin.datastore.disk.checksum import check
from sssd_plugin.datastore.disk.format import MANIFEST, Manifest, read_manifest
from sssd_plugin.datastore.errors import DatastoreError, first_line, reporting

logger = logging.getLogger("freedraft.datastore")

_KEPT_SECONDS = 86400.0


class UnreachableError(DatastoreError):
    """The URL does not answer, refuses, or holds no such file."""


def cache_folder() -> Path:
    """Return the folder of local copies: the variable FREEDRAFT_CACHE, or ~/.cache/freedraft/stores."""
    return Path(os.environ.get("FREEDRAFT_CACHE") or Path.home() / ".cache" / "freedraft" / "stores")


def open_url(url: str) -> tuple[Any, str]:
    """Return the fsspec file system of `url`, and the path there; `DatastoreError` without fsspec or its driver."""
    try:
        import fsspec
    except ImportError:
        raise DatastoreError(f"{url}: reading stores from URLs needs fsspec: pip install fsspec") from None
    with reaching(url):
        return fsspec.core.url_to_fs(url.rstrip("/"))


@contextlib.contextmanager
def reaching(url: str) -> Iterator[None]:
    """Context: turn any exception of a driver into an error of one line."""
    try:
        yield
    except (DatastoreError, KeyboardInterrupt):
        raise
    except FileNotFoundError:
        raise UnreachableError(f"no datastore at {url} (a file is missing): correct the URL") from None
    except (ImportError, ValueError) as error:
        raise DatastoreError(f"cannot open {url}: {first_line(error)}; install its fsspec driver") from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DatastoreError(f"no space left for {url}: free some, or set FREEDRAFT_CACHE") from None
        why = f"{first_line(error)}; check the address and the access rights"
        raise UnreachableError(f"cannot reach {url}: {why}") from None


def local_copy(url: str, cache: Path | None = None) -> Path:
    """Return a local copy of the store at `url`; the last one while the URL is unreachable. Raises DatastoreError: the
    store is missing or damaged, or unreachable without a copy.

    Every file of the copy is compared with its digests; missing or damaged ones are fetched, by one process per host.
    Copies unused for a day are removed.
    """
    folder = (cache or cache_folder()) / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:32]
    try:
        files, root = open_url(url)
        with reaching(url):
            content = bytes(files.cat_file(f"{root}/{MANIFEST}"))
        target = folder / hashlib.sha256(content).hexdigest()[:32]
        with reporting("write", folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = FileLock(folder / "lock", create=True, wait=True)
        try:
            _complete(target, content, files, root, url)
            with reporting("write", target):
                os.utime(target)
                _remove_old(folder, target)
        finally:
            lock.release()
        return target
    except UnreachableError as error:
        if (last := _last_copy(folder)) is None:
            raise
        logger.warning("freedraft: %s; its last copy on this host is used", error)
        return last


def _complete(target: Path, content: bytes, files: Any, root: str, url: str) -> None:
    """Fetch missing and damaged files. The manifest comes last: a copy with one was complete."""
    for path, entry, bounds in Manifest.parse(content, f"{url}/{MANIFEST}").files(target):
        name = path.relative_to(target).as_posix()
        with contextlib.suppress(DatastoreError):
            check([(path, entry, bounds)])
            continue
        part = path.with_name(f".{path.name}.part")
        try:
            with reporting("write", path):
                if path.parent.is_symlink():  # as earlier versions kept copies
                    path.parent.unlink()
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with reaching(url):
                files.get_file(f"{root}/{name}", str(part))
            check([(part, entry, bounds)])
            with reporting("write", path):
                with part.open("rb") as file:
                    os.fsync(file.fileno())
                part.replace(path)
                fsync_folder(path.parent)
        except DatastoreError as error:
            raise type(error)(str(error).replace(str(part), f"{url}/{name}")) from None
        finally:
            part.unlink(missing_ok=True)
    with reporting("write", target / MANIFEST):
        if not (target / MANIFEST).is_file() or (target / MANIFEST).read_bytes() != content:
            target.mkdir(mode=0o700, exist_ok=True)
            write_atomically(target / MANIFEST, content)


def _last_copy(folder: Path) -> Path | None:
    """Return the most recently used copy with a readable manifest."""
    copies = []
    for manifest in folder.glob(f"[!.]*/{MANIFEST}"):
        with contextlib.suppress(OSError, DatastoreError):  # another process removes it, or it is damaged
            read_manifest(manifest.parent)
            copies.append((manifest.parent.stat().st_mtime, manifest.parent))
    return max(copies)[1] if copies else None


def _remove_old(folder: Path, target: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and path != target and path.stat().st_mtime <= time.time() - _KEPT_SECONDS:
            (path / MANIFEST).unlink(missing_ok=True)
            shutil.rmtree(path, ignore_errors=True)
