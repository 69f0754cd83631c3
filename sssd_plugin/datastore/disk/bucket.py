"""`Bucket`: a store in object storage, in a folder, or wherever fsspec reaches, with a copy on this host.

    URL/manifest.json                 of a store that was built and copied there
    URL/manifest-<generation>.json    of what a fleet learns: the greatest generation holds
    URL/<sub-index>/...               as in a folder
    URL/batches/<replica>-<number>    what a replica learnt, until it is in a sub-index

A generation is made by whoever creates its manifest, which only one can (a conditional put), from the one before.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from freedraft.files import FileLock, fsync_folder, write_atomically
from sssd_plugin.datastore.disk.checksum import check
from sssd_plugin.datastore.disk.format import MANIFEST, Manifest, read_manifest
from sssd_plugin.datastore.errors import DatastoreError, first_line, reporting

logger = logging.getLogger("freedraft.datastore")

BATCHES = "batches"
_MANIFEST = re.compile(r"manifest(?:-(\d+))?\.json")
_SUB_INDEX = re.compile(r"[0-9a-f]{32}")  # a content address
_KEPT_SECONDS = 86400.0


class UnreachableError(DatastoreError):
    """The bucket does not answer, or refuses."""


class Generation(NamedTuple):
    """A manifest in a bucket."""

    number: int
    content: bytes


def cache_folder() -> Path:
    """Return the folder of local copies: the variable FREEDRAFT_CACHE, or ~/.cache/freedraft/stores."""
    return Path(os.environ.get("FREEDRAFT_CACHE") or Path.home() / ".cache" / "freedraft" / "stores")


class Bucket:
    """A store at a URL.

    Args:
        url: whatever the installed fsspec opens, or the path of a folder.
        cache: folder of the copies; None for `cache_folder`.

    Raises:
        DatastoreError: fsspec or its driver is not installed; from all methods: `UnreachableError`.
    """

    def __init__(self, url: str, cache: Path | None = None) -> None:
        self.url = url.rstrip("/")
        self.folder = (cache or cache_folder()) / hashlib.sha256(self.url.encode()).hexdigest()[:32]
        try:
            import fsspec
        except ImportError:
            raise DatastoreError(f"{url}: reading stores from URLs needs fsspec: pip install fsspec") from None
        with _reaching(url):
            self._files, self._root = fsspec.core.url_to_fs(self.url)
        self._local = "file" in self._files.protocol

    def newest(self, known: Generation | None = None) -> Generation | None:
        """Return the newest manifest, which may be a known one; None if there is none."""
        try:
            paths = self._list(self._root)
        except UnreachableError:  # it may not be allowed, and it may still have what was built
            return Generation(0, self.read(MANIFEST))
        matches = (_MANIFEST.fullmatch(PurePosixPath(path).name) for path in paths)
        number = max((int(match[1] or 0) for match in matches if match), default=0)
        if number and known is not None and number == known.number:
            return known
        if not number and not self._exists(MANIFEST):
            return None
        try:
            return Generation(number, self.read(_manifest_name(number)))
        except UnreachableError:
            if self._exists(_manifest_name(number)):
                raise
            return self.newest()  # whoever has made the next one has removed it

    def publish(self, manifest: Manifest, number: int) -> bool:
        """Make a generation; return whether nobody else has made it before."""
        return self._create(_manifest_name(number), manifest.content())

    def batches(self) -> dict[str, tuple[str, int]]:
        """Return the replica and the number of each batch, by path below the root."""
        names = [PurePosixPath(path).name for path in self._list(f"{self._root}/{BATCHES}")]
        parts = {f"{BATCHES}/{name}": name.rpartition("-") for name in names}
        return {path: (replica, int(n)) for path, (replica, _, n) in parts.items() if replica and n.isdigit()}

    def read(self, name: str) -> bytes:
        with _reaching(self.url):
            return bytes(self._files.cat_file(f"{self._root}/{name}"))

    def write(self, name: str, data: bytes) -> None:
        """Put a file, which nobody sees in part."""
        path = f"{self._root}/{name}"
        with _reaching(self.url):
            if not self._local:
                self._files.pipe_file(path, data)
                return
            self._files.makedirs(str(PurePosixPath(path).parent), exist_ok=True)
            for last in (False, False, True):
                try:
                    return write_atomically(Path(path), data, mode=0o666)
                except FileNotFoundError:  # somebody took the part for one that a killed process has left
                    if last:
                        raise

    def upload(self, folder: Path) -> None:
        """Put the files of a sub-index."""
        with _reaching(self.url):
            if self._local:
                self._files.makedirs(f"{self._root}/{folder.name}", exist_ok=True)
            for path in folder.iterdir():
                target = f"{self._root}/{folder.name}/{path.name}"
                if self._local:  # somebody may be reading, or sending, the same there
                    part = f"{target}.{secrets.token_hex(4)}.new"
                    shutil.copyfile(path, part)
                    os.replace(part, target)  # noqa: PTH105
                elif self._size(target) != path.stat().st_size:  # else somebody may be reading the same there
                    self._files.put_file(str(path), target)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, or sub-indices, below the root; what is gone already is."""
        for name in names:
            with _reaching(self.url), contextlib.suppress(FileNotFoundError):
                self._files.rm(f"{self._root}/{name}", recursive=True)

    def others(self, manifest: Manifest) -> list[str]:
        """Return the sub-indices that a manifest does not name, of generations before it or of nobody's, and parts of
        batches that killed processes have left."""
        kept = {sub.name for sub in manifest.sub_indices}
        names = [PurePosixPath(path).name for path in self._list(self._root)]
        subs = [name for name in names if _SUB_INDEX.fullmatch(name) and name not in kept]
        batches = [PurePosixPath(path).name for path in self._list(f"{self._root}/{BATCHES}")]
        return subs + [f"{BATCHES}/{name}" for name in batches if name.startswith(".")]

    def remove_generations(self, number: int) -> None:
        """Remove the manifests of those before this one."""
        matches = [_MANIFEST.fullmatch(PurePosixPath(path).name) for path in self._list(self._root)]
        self.remove(match[0] for match in matches if match and match[1] and int(match[1]) < number)

    def fetch_newest(self) -> tuple[Generation, Path] | None:
        """Return the newest generation, and its store on this host; None if there is none."""
        while True:
            generation = self.newest()
            if generation is None:
                return None
            try:
                return generation, self.fetch(generation)
            except DatastoreError:
                if self.newest() == generation:
                    raise  # else its files are gone because there is a newer one

    def fetch(self, generation: Generation) -> Path:
        """Return the store of a generation on this host. What is new is fetched, by one process for all of the host,
        and compared with its SHA-256.

        Raises:
            DatastoreError: something is missing or damaged.
        """
        target = self.folder / hashlib.sha256(generation.content).hexdigest()[:32]
        with reporting("write", target):
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = FileLock(self.folder / "lock", create=True, wait=True)
        try:
            with reporting("read", target):
                path = target / MANIFEST
                whole = path.is_file() and path.read_bytes() == generation.content
            if not whole:  # not here yet, or damaged
                _remove(target)
                self._fetch(target, generation.content)
            manifest = read_manifest(target)
            with reporting("write", target):
                os.utime(target)
                self._remove_old(target, manifest)
        finally:
            lock.release()
        return target

    def last_copy(self) -> tuple[Path, Manifest] | None:
        """Return the store that was fetched last, of those whose manifest can be read, and this."""
        copies = []
        for manifest in self.folder.glob(f"[!.]*/{MANIFEST}"):
            with contextlib.suppress(OSError):  # another process removes it
                copies.append((manifest.parent.stat().st_mtime, manifest.parent))
        for _, copy in sorted(copies, reverse=True):
            with contextlib.suppress(DatastoreError):
                return copy, read_manifest(copy)
        return None

    def _fetch(self, target: Path, content: bytes) -> None:
        temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
        try:
            with reporting("write", temporary):
                temporary.mkdir(mode=0o700)
                (temporary / MANIFEST).write_bytes(content)
            manifest = read_manifest(temporary)
            for sub in manifest.sub_indices:
                parts = manifest.model_copy(update={"sub_indices": (sub,)}).files(temporary)
                address = self.folder / sub.address
                with reporting("write", temporary):
                    (temporary / sub.name).mkdir(mode=0o700)
                if not address.exists():
                    for path, _, _ in parts:
                        with _reaching(self.url):
                            name = path.relative_to(temporary).as_posix()
                            self._files.get_file(f"{self._root}/{name}", str(path))
                    check(parts, pinned=all(entry.sha256 for _, entry, _ in parts))
                    with reporting("write", address):
                        _sync(path for path, _, _ in parts)
                        (temporary / sub.name).rename(address)
                else:
                    (temporary / sub.name).rmdir()
                with reporting("write", temporary):
                    (temporary / sub.name).symlink_to(Path("..") / address.name)
            with reporting("write", target):
                _sync([temporary / MANIFEST])
                temporary.rename(target)
                fsync_folder(self.folder)
        except DatastoreError as error:
            raise type(error)(str(error).replace(str(temporary), self.url)) from None
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _remove_old(self, newest: Path, manifest: Manifest) -> None:
        """Remove copies: of what is learnt at once, because something may be erased; of what is built those that nobody
        has used for a day."""
        until = time.time() - (0 if manifest.learnt else _KEPT_SECONDS)
        used = {"lock"}
        for path in self.folder.iterdir():
            if not (path / MANIFEST).is_file():
                continue
            if path != newest and path.stat().st_mtime <= until:
                _remove(path)
            else:
                used |= {path.name, *(link.readlink().name for link in path.iterdir() if link.is_symlink())}
        for path in self.folder.iterdir():
            if path.name not in used:
                _remove(path)

    def _create(self, name: str, data: bytes) -> bool:
        """Create a file unless it exists; return whether it holds this."""
        path = f"{self._root}/{name}"
        if self._local:  # where a file must not be seen before it is whole
            temporary = f".{name}.{secrets.token_hex(4)}"
            self.write(temporary, data)
            with reporting("write", Path(path)), contextlib.suppress(FileExistsError):
                os.sync()
                os.link(f"{self._root}/{temporary}", path)
            self.remove([temporary])
        else:
            try:
                with _reaching(self.url):
                    self._files.pipe_file(path, data, mode="create")
            except UnreachableError:  # drivers differ in what they raise where it exists, or an answer was lost
                if not self._exists(name):
                    raise
        return self.read(name) == data

    def _exists(self, name: str) -> bool:
        with _reaching(self.url):
            self._files.invalidate_cache()
            return bool(self._files.exists(f"{self._root}/{name}"))

    def _size(self, path: str) -> int | None:
        self._files.invalidate_cache()
        try:
            return int(self._files.size(path))
        except FileNotFoundError:
            return None

    def _list(self, path: str) -> list[str]:
        with _reaching(self.url):
            self._files.invalidate_cache()
            try:
                return [str(name).rstrip("/") for name in self._files.ls(path, detail=False)]
            except FileNotFoundError:
                return []


def local_copy(url: str, cache: Path | None = None) -> Path:
    """Return a local copy of the store at `url`; where it cannot be reached, the last one.

    Raises:
        DatastoreError: it is missing or damaged, or out of reach and there is no copy.
    """
    bucket = Bucket(url, cache)
    try:
        found = bucket.fetch_newest()
    except UnreachableError as error:
        last = bucket.last_copy()
        if last is None:
            raise
        logger.warning("freedraft: %s; its last copy on this host is used", error)
        return last[0]
    if found is None:
        raise DatastoreError(f"no datastore at {url} (a file is missing): correct the URL")
    return found[1]


def _remove(folder: Path) -> None:
    """Remove a folder, of which a kill leaves all or nothing under its name."""
    if not folder.is_dir():
        return
    aside = folder.with_name(f".{secrets.token_hex(8)}")
    with contextlib.suppress(OSError):
        folder.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _sync(paths: Iterable[Path]) -> None:
    """Have files, and the names in their folders, on the disk before a name is given to all of it."""
    folders = set()
    for path in paths:
        with path.open("rb") as file:
            os.fsync(file.fileno())
        folders.add(path.parent)
    for folder in folders:
        fsync_folder(folder)


def _manifest_name(number: int) -> str:
    return f"manifest-{number:012d}.json" if number else MANIFEST


@contextlib.contextmanager
def _reaching(url: str) -> Iterator[None]:
    """Turn whatever a driver raises into one line."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DatastoreError(f"no space left for {url}: free some, or set FREEDRAFT_CACHE") from None
        if not isinstance(error, FileNotFoundError):
            raise UnreachableError(
                f"cannot reach {url}: {first_line(error)}; check the address and the access rights"
            ) from None
        raise UnreachableError(f"no datastore at {url} (a file is missing): correct the URL") from None
    except (ImportError, ValueError) as error:
        raise DatastoreError(f"cannot open {url}: {first_line(error)}; install its fsspec driver") from None
    except Exception as error:
        reason = first_line(error)
        raise UnreachableError(f"cannot reach {url}: {reason}; check the address and the access rights") from None
