"""What is done to a fleet from outside: forgetting, and exporting what was learnt."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sssd_plugin.datastore.build.sorting import Sorter
from sssd_plugin.datastore.disk.bucket import Bucket
from sssd_plugin.datastore.disk.sections import learnt_sub_indices
from sssd_plugin.datastore.errors import DatastoreError, reporting
from sssd_plugin.datastore.fleet import replica
from sssd_plugin.datastore.fleet.compaction import announce, compact, newest
from sssd_plugin.datastore.index.sub_index import SEPARATOR
from sssd_plugin.datastore.live.maintenance import learnt_documents
from sssd_plugin.datastore.live.tenants import tenant_digest
from sssd_plugin.datastore.records import Erasure


def forget(url: str, tenants: Sequence[str], before: int | None, memory: int) -> None:
    """Erase what replicas learnt, of these tenants (none: of all), from before a time (ms; None: until this returns).
    Nothing of it is then in the bucket's sub-indices and batches; replicas follow when they look next.

    Raises:
        DatastoreError: no fleet learns there, or it is out of reach.
    """
    bucket = Bucket(url)
    key = bytes.fromhex(newest(bucket)[3].key)
    digests: list[bytes | None] = [tenant_digest(key, name) for name in tenants]
    # Until all replicas have looked they learn and publish as before; their clocks may be ahead by as much.
    seconds = 2 * replica.POLL_SECONDS
    until = int(1000 * (time.time() + seconds)) if before is None else before
    announce(bucket, [Erasure(digest, until) for digest in digests or [None]])
    compact(bucket, Sorter(), memory=memory)
    time.sleep(seconds)
    compact(bucket, Sorter(), memory=memory)


def export(place: str, out: Path, tenants: Sequence[str], *, accept: bool = False) -> tuple[int, int]:
    """Write learnt documents, of these tenants (none: of all), as token ids with a separator after each.

    Args:
        place: the directory of a store, or the URL of a fleet.
        accept: whether texts of tenants that were kept apart may come together.

    Returns:
        The number of documents and of their tokens.

    Raises:
        DatastoreError: nothing was learnt, tenants were kept apart, or a file cannot be read or written.
    """
    if "://" in place:
        bucket = Bucket(place)
        _, path, manifest, learnt = newest(bucket)
        digests = {tenant_digest(bytes.fromhex(learnt.key), name) for name in tenants}
        subs = learnt_sub_indices(path, manifest)
        records = [r for sub in subs for r in sub.records() if not digests or r.tenant in digests]
        isolation = learnt.isolation
    else:
        folder, records = learnt_documents(Path(place), tenants)
        isolation = folder.isolation
    if isolation == "tenant" and len(tenants) != 1 and not accept:
        raise DatastoreError(
            f"{place} keeps tenants apart, and who drafts from {out} sees all: name one with --tenants, or say --accept"
        )
    parts = [part for record in records for part in (record.tokens, [SEPARATOR])]
    with reporting("write", out), out.open("xb") as file:
        np.save(file, np.concatenate([np.zeros(0), *parts], dtype=np.int32, casting="unsafe"))
    return len(records), sum(len(record.tokens) for record in records)
