"""`UrlFolder`: files at a URL; `local_copy`: the copy, on this host, of a store there."""

import contextlib
import errno
import hashlib
import logging
import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from freedraft.files import FileLock, fsync_folder, write_atomically
from sssd_plugin.datastore.disk.checksum import check
from sssd_plugin.datastore.disk.format import MANIFEST, Manifest, read_manifest
from sssd_plugin.datastore.errors import DatastoreError, first_line, reporting

logger = logging.getLogger("freedraft.datastore")

_KEPT_SECONDS = 86400.0
_MISSING = "no datastore at {} (a file is missing): correct the URL"


class UnreachableError(DatastoreError):
    """The URL does not answer, refuses, or holds no such file."""


def cache_folder() -> Path:
    return Path(os.environ.get("FREEDRAFT_CACHE") or Path.home() / ".cache" / "freedraft" / "stores")


@contextlib.contextmanager
def reaching(url: str) -> Iterator[None]:
    """Turn any exception of a driver into an error of one line."""
    try:
        yield
    except (DatastoreError, KeyboardInterrupt):
        raise
    except FileNotFoundError:
        raise UnreachableError(_MISSING.format(url)) from None
    except (ImportError, ValueError) as error:
        raise DatastoreError(f"cannot open {url}: {first_line(error)}; install its fsspec driver") from None
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DatastoreError(f"no space left for {url}: free some, or set FREEDRAFT_CACHE") from None
        why = f"{first_line(error)}; check the address and the access rights"
        raise UnreachableError(f"cannot reach {url}: {why}") from None


class UrlFolder:
    """A folder at a URL of any fsspec driver. Raises DatastoreError: fsspec or the driver is missing; methods raise
    UnreachableError."""

    def __init__(self, url: str, folder: str = "") -> None:
        self.url = url.rstrip("/")
        try:
            import fsspec
        except ImportError:
            raise DatastoreError(f"{url}: reading stores from URLs needs fsspec: pip install fsspec") from None
        with reaching(url):
            self._files, root = fsspec.core.url_to_fs(self.url)
        self._root, self._local = f"{root}/{folder}".rstrip("/"), "file" in self._files.protocol

    def names(self) -> dict[str, int]:
        """Return the sizes of all files, by name."""
        with reaching(self.url):
            self._files.invalidate_cache()
            try:
                entries = self._files.ls(self._root, detail=True)
            except FileNotFoundError:
                return {}
            files = [entry for entry in entries if entry["type"] == "file"]
            return {str(entry["name"]).rpartition("/")[2]: int(entry["size"] or 0) for entry in files}

    def fetch(self, name: str, path: Path) -> None:
        with reaching(self.url):
            self._files.get_file(f"{self._root}/{name}", str(path))

    def get(self, name: str) -> bytes | None:  # None if it is missing
        with reaching(self.url):
            try:
                return bytes(self._files.cat_file(f"{self._root}/{name}"))
            except FileNotFoundError:
                return None

    def put(self, name: str, data: bytes) -> None:
        """Write a file atomically."""
        with reaching(self.url):
            if not self._local:
                self._files.pipe_file(f"{self._root}/{name}", data)
                return
            Path(self._root).mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):  # another process removed the part as a killed process's
                return write_atomically(Path(self._root, name), data, mode=0o666)
            write_atomically(Path(self._root, name), data, mode=0o666)

    def create(self, name: str, data: bytes) -> None:
        """Write a file unless it exists."""
        if self._local:
            self.put(part := f".{name}.{secrets.token_hex(4)}", data)
            with reaching(self.url), contextlib.suppress(FileExistsError):
                os.link(Path(self._root, part), Path(self._root, name))
            self.remove(part)
            return
        try:
            with reaching(self.url):
                self._files.pipe_file(f"{self._root}/{name}", data, mode="create")
        except UnreachableError:  # drivers raise different errors for an existing file
            if self.get(name) is None:
                raise

    def remove(self, name: str) -> None:
        with reaching(self.url), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(f"{self._root}/{name}")


def local_copy(url: str) -> Path:
    """Return a local copy of the store at `url`; the last one while the URL is unreachable. Raises DatastoreError: the
    store is missing or damaged, or unreachable without a copy.

    Every file of the copy is compared with its digests; missing or damaged ones are fetched, by one process per host.
    Copies unused for a day are removed.
    """
    folder = cache_folder() / hashlib.sha256(url.rstrip("/").encode()).hexdigest()[:32]
    try:
        source = UrlFolder(url)
        content = source.get(MANIFEST)
        if content is None:
            raise UnreachableError(_MISSING.format(url))
        target = folder / hashlib.sha256(content).hexdigest()[:32]
        with reporting("write", folder):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = FileLock(folder / "lock", create=True, wait=True)
        try:
            _complete(target, content, source)
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


def _complete(target: Path, content: bytes, source: UrlFolder) -> None:
    """Fetch missing and damaged files. The manifest comes last: a copy with one was complete."""
    for path, entry, bounds in Manifest.parse(content, f"{source.url}/{MANIFEST}").files(target):
        name = path.relative_to(target).as_posix()
        with contextlib.suppress(DatastoreError):
            check([(path, entry, bounds)])
            continue
        part = path.with_name(f".{path.name}.part")
        try:
            with reporting("write", path):
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            source.fetch(name, part)
            check([(part, entry, bounds)])
            with reporting("write", path):
                with part.open("rb") as file:
                    os.fsync(file.fileno())
                part.replace(path)
                fsync_folder(path.parent)
        except DatastoreError as error:
            raise type(error)(str(error).replace(str(part), f"{source.url}/{name}")) from None
        finally:
            part.unlink(missing_ok=True)
    with reporting("write", target / MANIFEST):
        if not (target / MANIFEST).is_file() or (target / MANIFEST).read_bytes() != content:
            target.mkdir(mode=0o700, exist_ok=True)
            write_atomically(target / MANIFEST, content)


def _last_copy(folder: Path) -> Path | None:
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
