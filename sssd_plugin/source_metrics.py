"""Prometheus metrics of the sources: how often each knows the context, and whose tokens are accepted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from prometheus_client import Counter, Gauge

from sssd_plugin.provenance import ACCEPTED, HITS, LOOKUPS, SIZE, SOURCES

if TYPE_CHECKING:
    from sssd_plugin.datastore.index.sub_index import Snapshot
    from sssd_plugin.drafter import Drafter

EVERY = 8
"""One step in so many is looked at."""

_LOOKUPS = Counter("freedraft_lookups", f"Contexts that were drafted for, of one step in {EVERY}")
_HITS = Counter("freedraft_hits", "Of these, those whose last 2 tokens the source knows", ["source"])
_SOURCED = Counter(
    "freedraft_sourced_tokens",
    f"Accepted draft tokens, of one step in {EVERY}, by the source that knows the longest context for them",
    ["source"],
)
_STATIC_TOKENS = Gauge(
    "freedraft_static_tokens", "Tokens in the datastore that was built", multiprocess_mode="livemax"
)  # fmt: skip
_STATIC_SUB_INDICES = Gauge(
    "freedraft_static_sub_indices", "Sub-indices of the datastore that was built", multiprocess_mode="livemax"
)


class SourceMetrics:
    """What the sources of one drafter are worth."""

    def __init__(self, static: Snapshot) -> None:
        self._steps = 0
        self._hits = [_HITS.labels(source) for source in SOURCES]
        self._sourced = [_SOURCED.labels(source) for source in (*SOURCES, "other")]
        self.show_static(static)

    def show_static(self, static: Snapshot) -> None:
        """The store that was built is now this one."""
        _STATIC_TOKENS.set(static.n_tokens)
        _STATIC_SUB_INDICES.set(len(static.sub_indices))

    def look(self, drafter: Drafter, request_ids: Sequence[str], gained: Callable[[], NDArray[np.int64]]) -> None:
        """After the tokens of a step have entered the drafter.

        Args:
            gained: asked for int64 [B], how many tokens each request has gained by the step.
        """
        self._steps += 1
        if self._steps % EVERY:
            return
        tally = np.zeros(SIZE, np.int64)
        drafter.account(request_ids, gained(), tally)
        _LOOKUPS.inc(int(tally[LOOKUPS]))
        for counter, number in zip(self._hits, tally[HITS:ACCEPTED].tolist(), strict=True):
            counter.inc(number)
        for counter, number in zip(self._sourced, tally[ACCEPTED:].tolist(), strict=True):
            counter.inc(number)
