"""`open_live`: the live store of a server; `check_live`: whether it would open."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from sssd_plugin.datastore.disk.format import LIVE, MAX_VOCAB_SIZE, Isolation
from sssd_plugin.datastore.errors import DatastoreError
from sssd_plugin.datastore.index.sub_index import Snapshot
from sssd_plugin.datastore.live.exchange import Exchange
from sssd_plugin.datastore.live.folder import FolderLock, LiveManifest
from sssd_plugin.datastore.live.log import Log
from sssd_plugin.datastore.live.store import MAX_TOKENS, LiveStore


def open_live(
    place: Path | str | None,
    vocab_size: int,
    *,
    static: Snapshot | None = None,
    fingerprint: str | None = None,
    isolation: Isolation = "salt",
    max_tokens: int = MAX_TOKENS,
    max_age: float | None = None,
) -> LiveStore:
    """Open a live store over a place (None: in memory only).

    Processes of one host that open the same directory learn from each other, and those of any host at the same URL.

    Args:
        place: the directory of a store, where what is learnt goes into a folder `live`; or a URL, as of `Exchange`.
        fingerprint: of the model's tokenizer.

    Raises:
        DatastoreError: the directory cannot be read or written, is of another tokenizer, isolation or version, or
            another host learns there.
    """
    log: Log | Exchange | None = None
    if "://" in str(place):
        log = Exchange(str(place), vocab_size, fingerprint, isolation, max_tokens, max_age)
    elif place is not None:
        log = Log.open(Path(place), vocab_size, max_tokens, fingerprint, isolation)
    try:
        return LiveStore(
            vocab_size, static=static, isolation=isolation, max_tokens=max_tokens, max_age=max_age, log=log
        )
    except BaseException:
        with contextlib.suppress(Exception):
            if log is not None:
                log.close()
        raise


def check_live(place: Path | str, vocab_size: int | None, fingerprint: str | None, isolation: Isolation) -> None:
    """Refuse, before an engine starts, what `open_live` would refuse. Changes no folder. Raises DatastoreError: see
    `open_live`."""
    vocab_size = vocab_size or MAX_VOCAB_SIZE
    if "://" in str(place):
        Exchange(str(place), vocab_size, fingerprint, isolation).check()
        return
    folder = Path(place) / LIVE
    above = folder
    while not above.exists():
        above = above.parent
    if not above.is_dir():
        raise DatastoreError(f"{above} is a file, so nothing can be learnt in {folder}: choose another path")
    if not os.access(above, os.W_OK | os.X_OK):
        raise DatastoreError(f"cannot write {above}: give this user access or choose another path")
    if folder.exists():
        manifest = LiveManifest.of(folder)
        with FolderLock(folder) as lock:
            if manifest is not None:
                manifest.check_fits(folder, vocab_size, fingerprint, isolation)
                manifest.narrowed(isolation, folder, lock.alone)
