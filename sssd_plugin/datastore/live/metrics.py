"""Prometheus metrics of a live datastore."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge

if TYPE_CHECKING:
    from sssd_plugin.datastore.live.store import LiveDatastore

_TOKENS = Gauge("freedraft_live_tokens", "Tokens in the live datastore", multiprocess_mode="livesum")
_DELTA = Gauge("freedraft_live_delta_tokens", "Of these, in runs that grow with each document",
               multiprocess_mode="livesum")  # fmt: skip
_SUB_INDICES = Gauge("freedraft_live_sub_indices", "Most live sub-indices that a request is drafted from",
                     multiprocess_mode="livemax")  # fmt: skip
_BYTES = Gauge("freedraft_live_bytes", "Memory of the live datastore", multiprocess_mode="livesum")
_TENANTS = Gauge("freedraft_live_tenants", "Tenants that have learnt something", multiprocess_mode="livesum")
_DOCUMENTS = Counter("freedraft_live_documents", "Finished requests that were learnt from")
_INSERTED = Counter("freedraft_live_inserted_tokens", "Tokens that were learnt")
_INSERT_SECONDS = Counter("freedraft_live_insert_seconds", "Time until what was learnt was visible, in all")
_MERGES = Counter("freedraft_live_merges", "Merges of live sub-indices in the background")
_MERGE_SECONDS = Counter("freedraft_live_merge_seconds", "Time that they took")


class LiveMetrics:
    """Shows the state of one live datastore."""

    def __init__(self) -> None:
        self._next = 0.0
        self._shown = dict.fromkeys(("documents", "inserted", "insert_seconds", "merges", "merge_seconds"), 0.0)

    def show(self, live: LiveDatastore) -> None:
        """Bring the metrics up to date, for at most a hundredth of the time: with many tenants that takes a while."""
        now = time.monotonic()
        if now < self._next:
            return
        stats = live.stats()
        _TOKENS.set(stats.tokens)
        _DELTA.set(stats.delta_tokens)
        _SUB_INDICES.set(stats.max_sub_indices)
        _BYTES.set(stats.nbytes)
        _TENANTS.set(max(0, stats.tenants - 1))
        for name, counter in (
            ("documents", _DOCUMENTS),
            ("inserted", _INSERTED),
            ("insert_seconds", _INSERT_SECONDS),
            ("merges", _MERGES),
            ("merge_seconds", _MERGE_SECONDS),
        ):
            value = getattr(stats, name)
            counter.inc(value - self._shown[name])
            self._shown[name] = value
        self._next = now + 100 * (time.monotonic() - now)
