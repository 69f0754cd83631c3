"""Prometheus metrics of the n-gram sources: how often each knows the context, and whose tokens are accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from prometheus_client import Counter, Gauge

from sssd_plugin.scoring.attribution import ACCEPTED, HITS, LOOKUPS, SIZE, SOURCES

if TYPE_CHECKING:
    from sssd_plugin.datastore.index.sub_index import Snapshot
    from sssd_plugin.drafter import Drafter

EVERY = 8  # one step in so many is counted

_LOOKUPS = Counter("freedraft_lookups", f"Contexts that were drafted for, of one step in {EVERY}")
_HITS = Counter("freedraft_hits", "Of these, those whose last 2 tokens the source knows", ["source"])
_SOURCED = Counter(
    "freedraft_sourced_tokens",
    f"Accepted draft tokens, of one step in {EVERY}, by the source that knows the longest context for them",
    ["source"],
)
_STATIC_TOKENS = Gauge("freedraft_static_tokens", "Tokens in the datastore that was built", multiprocess_mode="livemax")
_STATIC_SUB_INDICES = Gauge(
    "freedraft_static_sub_indices", "Sub-indices of the datastore that was built", multiprocess_mode="livemax"
)


class SourceMetrics:
    """Counts how often each source of one drafter pays."""

    def __init__(self, static: Snapshot) -> None:
        self._steps = 0
        self._hits = [_HITS.labels(source) for source in SOURCES]
        self._sourced = [_SOURCED.labels(source) for source in (*SOURCES, "other")]
        self.set_static(static)

    def set_static(self, static: Snapshot) -> None:
        _STATIC_TOKENS.set(static.n_tokens)
        _STATIC_SUB_INDICES.set(len(static.sub_indices))

    def update(self, drafter: Drafter, request_ids: Sequence[str], gained: Callable[[], NDArray[np.int64]]) -> None:
        """Count one step, after its tokens have entered the drafter.

        Args:
            gained: returns int64 [B], how many tokens each request has gained by the step; called when it is counted.
        """
        self._steps += 1
        if self._steps % EVERY:
            return
        tally = np.zeros(SIZE, np.int64)
        drafter.attribute(request_ids, gained(), tally)
        _LOOKUPS.inc(int(tally[LOOKUPS]))
        for counter, number in zip(self._hits, tally[HITS:ACCEPTED].tolist(), strict=True):
            counter.inc(number)
        for counter, number in zip(self._sourced, tally[ACCEPTED:].tolist(), strict=True):
            counter.inc(number)
