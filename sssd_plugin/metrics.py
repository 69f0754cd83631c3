"""Prometheus metrics of the n-gram sources, draft tokens and accepted tokens, and of the live datastore."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from prometheus_client import Counter, Gauge

from freedraft.draft import DraftBatch
from sssd_plugin.scoring.attribution import SOURCES

if TYPE_CHECKING:
    from sssd_plugin.datastore.index.sub_index import Snapshot
    from sssd_plugin.datastore.live.store import LiveStore
    from sssd_plugin.drafter import Drafter

EVERY = 32  # sampling interval, in steps

_BY = f"sampled in one step of {EVERY}, by the source with the longest context"
_SOURCED = Counter("freedraft_sourced_tokens", f"Accepted draft tokens, {_BY}", ["source"])
_SOURCED_DRAFT = Counter("freedraft_sourced_draft_tokens", f"Draft tokens to verify, {_BY}", ["source"])
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
    """Counts accepted tokens and draft tokens of one drafter, by source."""

    def __init__(self, static: Snapshot) -> None:
        self._steps = 0
        self._counters = [family.labels(source) for family in (_SOURCED, _SOURCED_DRAFT) for source in SOURCES]
        self.set_static(static)

    def set_static(self, static: Snapshot) -> None:
        _STATIC_TOKENS.set(sum(sub.n for sub in static))
        _STATIC_SUB_INDICES.set(len(static))

    def update(
        self, drafter: Drafter, request_ids: Sequence[str], gained: NDArray[np.int64], draft: DraftBatch | None
    ) -> None:
        """Count a step, after the drafter's update with its tokens, `gained` by each request, and their next draft."""
        self._steps += 1
        if self._steps % EVERY:
            return
        tally = np.zeros((2, len(SOURCES)), np.int64)
        drafter.attribute(request_ids, gained, draft or DraftBatch.empty(len(request_ids), 1), tally)
        for counter, number in zip(self._counters, tally.flat, strict=True):
            counter.inc(int(number))


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
