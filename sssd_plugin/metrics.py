"""Prometheus metrics of the n-gram sources, draft tokens and accepted tokens, and of the live datastore."""

import time
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray
from prometheus_client import Counter, Gauge

from sssd_plugin.datastore.index.sub_index import Snapshot
from sssd_plugin.datastore.live.store import LiveStore
from sssd_plugin.sources import SOURCES

_BY = "by the source with the longest context"
_SOURCED = Counter("freedraft_sourced_tokens", f"Draft tokens accepted by the target, {_BY}", ["source"])
_SOURCED_DRAFT = Counter("freedraft_sourced_draft_tokens", f"Draft tokens verified by the target, {_BY}", ["source"])
_STATIC_TOKENS = Gauge("freedraft_static_tokens", "Tokens in the built datastore", multiprocess_mode="livemax")
_STATIC_SUB_INDICES = Gauge(
    "freedraft_static_sub_indices", "Sub-indices of the built datastore", multiprocess_mode="livemax"
)

# Metrics by attribute of `LiveStats`.
_GAUGES = {
    "tokens": Gauge("freedraft_live_tokens", "Tokens in the live datastore", multiprocess_mode="livesum"),
    "max_sub_indices": Gauge(
        "freedraft_live_sub_indices", "Maximum of live sub-indices per request", multiprocess_mode="livemax"
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


class SourceMetrics:
    """Shows verified and accepted draft tokens of one drafter by source, and the size of its built datastore."""

    def __init__(self, static: Snapshot) -> None:
        self._counters = [family.labels(source) for family in (_SOURCED_DRAFT, _SOURCED) for source in SOURCES]
        self.set_static(static)

    def set_static(self, static: Snapshot) -> None:
        _STATIC_TOKENS.set(sum(sub.n for sub in static))
        _STATIC_SUB_INDICES.set(len(static))

    def add(self, totals: NDArray[np.int64]) -> None:
        """Add `Drafter.sourced` to the metrics, and set it to 0."""
        for counter, number in zip(self._counters, totals.reshape(-1).tolist(), strict=True):
            if number:
                counter.inc(number)
        totals[:] = 0


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
