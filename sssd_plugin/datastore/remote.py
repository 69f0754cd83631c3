"""Stores in object storage, or wherever fsspec reads from: copied to a local cache, and used from there."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
from pathlib import Path
from typing import Any

from sssd_plugin.datastore.errors import DatastoreError, reporting
from sssd_plugin.datastore.format import MANIFEST, read_manifest

CACHE_VARIABLE = "FREEDRAFT_CACHE"


def is_remote(place: str) -> bool:
    """Whether `place` is a URL ("s3://bucket/store") instead of a path."""
    return "://" in place


def is_copy(path: Path) -> bool:
    """Whether `local_copy` made the store at `path`."""
    return path.parent == _cache()


def _cache() -> Path:
    return Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "freedraft" / "stores")


def local_copy(url: str, cache: Path | None = None) -> Path:
    """A local copy of the store at `url`; the files are fetched once per version of the store.

    Args:
        url: whatever the installed fsspec opens.
        cache: folder of the copies; None for that of the variable FREEDRAFT_CACHE, or ~/.cache/freedraft/stores.

    Raises:
        DatastoreError: fsspec or its driver is not installed; the store is missing, out of reach or damaged.
    """
    cache = cache or _cache()
    try:
        import fsspec
    except ImportError:
        raise DatastoreError(f"{url}: reading stores from URLs needs fsspec: pip install fsspec") from None
    with _reaching(url):
        files, root = fsspec.core.url_to_fs(url)
        described = files.cat_file(f"{root}/{MANIFEST}")
    name = hashlib.sha256(url.encode() + b"\0" + described).hexdigest()[:32]
    target = cache / name
    if target.exists():
        return target
    temporary = cache / f".{name}.{secrets.token_hex(4)}"
    try:
        with reporting("write", temporary):
            temporary.mkdir(mode=0o700, parents=True)
            (temporary / MANIFEST).write_bytes(described)
        manifest = read_manifest(temporary)
        for path, _ in manifest.files(temporary):
            with reporting("write", path):
                path.parent.mkdir(mode=0o700, exist_ok=True)
            with _reaching(url):
                files.get_file(f"{root}/{path.relative_to(temporary).as_posix()}", str(path))
        from sssd_plugin.datastore.store import Datastore

        Datastore.open(temporary).close()  # before anyone uses it: every byte as recorded
        with reporting("write", target), contextlib.suppress(FileExistsError):
            try:
                temporary.rename(target)
            except OSError:
                if not target.exists():  # else somebody else was quicker
                    raise
    except DatastoreError as error:
        raise DatastoreError(str(error).replace(str(temporary), url)) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


class _reaching:
    """Turns whatever a driver raises into one line."""

    def __init__(self, url: str) -> None:
        self.url = url

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        if error is None or not isinstance(error, Exception):
            return
        if isinstance(error, FileNotFoundError):
            raise DatastoreError(f"no datastore at {self.url} (a file is missing): correct the URL") from None
        if isinstance(error, ImportError | ValueError):
            raise DatastoreError(f"cannot open {self.url}: {_first_line(error)}; install its fsspec driver") from None
        raise DatastoreError(
            f"cannot reach {self.url}: {_first_line(error)}; check the address and the access rights"
        ) from None


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
