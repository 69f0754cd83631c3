"""Stores in object storage, or wherever fsspec reads from: copied to a local cache, and used from there."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from sssd_plugin.datastore.disk.format import MANIFEST, read_manifest
from sssd_plugin.datastore.disk.store import Datastore
from sssd_plugin.datastore.errors import DatastoreError, first_line, reporting


def cache_folder() -> Path:
    """Return the folder of local copies: the variable FREEDRAFT_CACHE, or ~/.cache/freedraft/stores."""
    return Path(os.environ.get("FREEDRAFT_CACHE") or Path.home() / ".cache" / "freedraft" / "stores")


def local_copy(url: str, cache: Path | None = None) -> Path:
    """Return a local copy of the store at `url`, whose files are fetched once per version of the store.

    Args:
        url: whatever the installed fsspec opens.
        cache: folder of the copies; None for `cache_folder`.

    Raises:
        DatastoreError: fsspec or its driver is not installed; the store is missing, out of reach or damaged.
    """
    cache = cache or cache_folder()
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
        for path, *_ in manifest.files(temporary):
            with reporting("write", path):
                path.parent.mkdir(mode=0o700, exist_ok=True)
            with _reaching(url):
                files.get_file(f"{root}/{path.relative_to(temporary).as_posix()}", str(path))
        Datastore.open(temporary).close()  # before anyone uses it: every byte as recorded
        with reporting("write", target):
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


@contextlib.contextmanager
def _reaching(url: str) -> Iterator[None]:
    """Turn whatever a driver raises into one line."""
    try:
        yield
    except FileNotFoundError:
        raise DatastoreError(f"no datastore at {url} (a file is missing): correct the URL") from None
    except (ImportError, ValueError) as error:
        raise DatastoreError(f"cannot open {url}: {first_line(error)}; install its fsspec driver") from None
    except Exception as error:
        reason = first_line(error)
        raise DatastoreError(f"cannot reach {url}: {reason}; check the address and the access rights") from None
