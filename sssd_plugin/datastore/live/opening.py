"""`open_live` opens the live store of a server; `check_live` checks that it would open."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from sssd_plugin.datastore.disk.format import LIVE, MAX_VOCAB_SIZE, Isolation
from sssd_plugin.datastore.disk.remote import UnreachableError
from sssd_plugin.datastore.errors import DatastoreError, reporting
from sssd_plugin.datastore.index.sub_index import Snapshot
from sssd_plugin.datastore.live.exchange import Exchange
from sssd_plugin.datastore.live.folder import FolderLock, LiveManifest
from sssd_plugin.datastore.live.log import Log
from sssd_plugin.datastore.live.store import MAX_TOKENS, LiveStore

logger = logging.getLogger("freedraft.datastore")

_CHECK_SECONDS = 10.0


def open_live(
    place: Path | str | None, vocab_size: int, *, static: Snapshot | None = None, fingerprint: str | None = None,
    isolation: Isolation = "salt", max_tokens: int = MAX_TOKENS, max_age: float | None = None,
) -> LiveStore:  # fmt: skip
    """Open a live store at a place: the directory of a store, where learnt text goes into a folder `live`; a URL, see
    `Exchange`; or None, in memory only. Processes of one host with the same directory learn from each other, and those
    of any host with the same URL. Raises DatastoreError: the directory cannot be read or written, has another
    tokenizer, isolation or version, or another host learns there."""
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
        if log is not None:
            log.close()
        raise


def check_live(place: Path | str, vocab_size: int | None, fingerprint: str | None, isolation: Isolation) -> None:
    """Raise the errors of `open_live` before an engine starts, without changing a live folder."""
    vocab_size = vocab_size or MAX_VOCAB_SIZE
    if "://" in str(place):
        _check_url(Exchange(str(place), vocab_size, fingerprint, isolation))
        return
    folder = Path(place) / LIVE
    with reporting("write", folder):
        if not folder.exists():
            folder.mkdir(mode=0o700, parents=True)
            folder.rmdir()  # a store could not be built there otherwise
            return
    with FolderLock(folder) as lock:
        if manifest := LiveManifest.of(folder):
            manifest.admitting(folder, vocab_size, fingerprint, isolation, lock.alone)


def _check_url(exchange: Exchange) -> None:
    """Raise the errors of `Exchange.connect`, except that the URL does not answer within `_CHECK_SECONDS`."""
    errors: list[DatastoreError] = [UnreachableError(f"{exchange.url} does not answer")]

    def connect() -> None:
        try:
            exchange.connect()
            errors.clear()
        except DatastoreError as error:
            errors.append(error)

    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(_CHECK_SECONDS)
    for error in errors[-1:]:
        if not isinstance(error, UnreachableError):
            raise error
        logger.warning("freedraft: %s; the server starts, and tries again", error)
