"""Prometheus metrics of a live datastore."""

from __future__ import annotations

import time
from collections import defaultdict
from typing import TYPE_CHECKING

from prometheus_client import Counter, Gauge

if TYPE_CHECKING:
    from sssd_plugin.datastore.live.store import LiveStore

_GAUGES = {
    attribute: Gauge(f"freedraft_live_{name}", text, multiprocess_mode=mode)  # type: ignore[arg-type]
    for attribute, name, text, mode in (
        ("tokens", "tokens", "Tokens in the live datastore", "livesum"),
        ("max_sub_indices", "sub_indices", "Most live sub-indices that a request is drafted from", "livemax"),
        ("nbytes", "bytes", "Memory of the live datastore", "livesum"),
        ("tenants", "tenants", "Tenants that have learnt something", "livesum"),
    )
}
_COUNTERS = {
    "documents": Counter("freedraft_live_documents", "Finished requests that were learnt from"),
    "inserted": Counter("freedraft_live_inserted_tokens", "Tokens that were learnt"),
    "evicted": Counter("freedraft_live_evicted_tokens", "Learnt tokens that were dropped to make room"),
    "merges": Counter("freedraft_live_merges", "Merges of live sub-indices in the background"),
    "merge_seconds": Counter("freedraft_live_merge_seconds", "Time that they took"),
}
_DROPPED = Counter("freedraft_live_dropped_documents", "Finished requests that were not learnt from", ["reason"])


class LiveMetrics:
    """Shows the state of one live datastore."""

    def __init__(self) -> None:
        self._next = 0.0
        self._shown: defaultdict[str, float] = defaultdict(float)

    def show(self, live: LiveStore) -> None:
        """Bring the metrics up to date, for at most a hundredth of the time: with many tenants that takes a while."""
        now = time.monotonic()
        if now < self._next:
            return
        stats = live.stats()
        for name, gauge in _GAUGES.items():
            gauge.set(getattr(stats, name))
        for name, counter in _COUNTERS.items():
            value = getattr(stats, name)
            self._add(counter, name, value)
        for reason, value in stats.dropped.items():
            self._add(_DROPPED.labels(reason), reason, value)
        self._next = now + 100 * (time.monotonic() - now)

    def _add(self, counter: Counter, name: str, value: float) -> None:
        counter.inc(value - self._shown[name])
        self._shown[name] = value
