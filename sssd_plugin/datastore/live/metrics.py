"""Prometheus metrics of a live datastore."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge

if TYPE_CHECKING:
    from sssd_plugin.datastore.live.store import LiveStore

# Metrics by attribute of `LiveStats`.
_GAUGES = {
    "tokens": Gauge("freedraft_live_tokens", "Tokens in the live datastore", multiprocess_mode="livesum"),
    "max_sub_indices": Gauge(
        "freedraft_live_sub_indices",
        "Maximum of live sub-indices per request",
        multiprocess_mode="livemax",
    ),
    "nbytes": Gauge("freedraft_live_bytes", "Memory of the live datastore", multiprocess_mode="livesum"),
    "tenants": Gauge("freedraft_live_tenants", "Tenants with learnt text", multiprocess_mode="livesum"),
}
_COUNTERS = {
    "documents": Counter("freedraft_live_documents", "Finished requests that were learnt from"),
    "inserted": Counter("freedraft_live_inserted_tokens", "Tokens that were learnt"),
    "evicted": Counter("freedraft_live_evicted_tokens", "Learnt tokens dropped to make room"),
    "merges": Counter("freedraft_live_merges", "Merges of live sub-indices in the background"),
    "merge_seconds": Counter("freedraft_live_merge_seconds", "Time that they took"),
}
_DROPPED = Counter("freedraft_live_dropped_documents", "Finished requests that were not learnt from", ["reason"])


class LiveMetrics:
    """Shows the state of one live datastore."""

    def __init__(self) -> None:
        self._next = 0.0
        self._shown: defaultdict[Counter, float] = defaultdict(float)

    def show(self, live: LiveStore) -> None:
        """Update the metrics, at most 1 % of the time, since many tenants take long."""
        now = time.monotonic()
        if now < self._next:
            return
        stats = live.stats()
        for name, gauge in _GAUGES.items():
            gauge.set(getattr(stats, name))
        values = {counter: getattr(stats, name) for name, counter in _COUNTERS.items()}
        for counter, value in (values | {_DROPPED.labels(reason): n for reason, n in stats.dropped.items()}).items():
            counter.inc(value - self._shown[counter])
            self._shown[counter] = value
        self._next = now + 100 * (time.monotonic() - now)
