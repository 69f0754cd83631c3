"""One datastore of several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from sssd_plugin.datastore.build.builder import StoreBuilder
from sssd_plugin.datastore.disk.format import Manifest
from sssd_plugin.datastore.disk.store import Datastore
from sssd_plugin.datastore.errors import DatastoreError

_BLOCK = 1 << 20


def merge_stores(out: Path, stores: Sequence[Path], *, memory: int | None = None, replace: bool = False) -> Manifest:
    """Build a store at `out` of the documents of `stores`, in their order. Memory is bounded as for `StoreBuilder`.

    Raises:
        DatastoreError: a store that cannot be opened, stores of different tokenizers, or an `out` that may not be
            written.
    """
    opened = [Datastore.open(path) for path in stores]
    makers = [store.manifest.tokenizer for store in opened if store.manifest.tokenizer is not None]
    for maker in makers:
        if maker.fingerprint != makers[0].fingerprint:
            raise DatastoreError(
                f"the stores were built with different tokenizers ({makers[0].name}, {maker.name}): "
                f"merge only stores of one tokenizer"
            )
    if makers and len(makers) < len(opened):
        raise DatastoreError("some of the stores do not record their tokenizer: merge only stores of one tokenizer")
    with StoreBuilder(
        out,
        vocab_size=max(store.manifest.vocab_size for store in opened),
        tokenizer=makers[0] if makers else None,
        memory=memory,
        replace=replace,
    ) as builder:
        for store in opened:
            for sub in store.snapshot.sub_indices:
                for start in range(0, sub.n, _BLOCK):
                    builder.append(sub.tokens[start : min(start + _BLOCK, sub.n)])
        return builder.finish()
