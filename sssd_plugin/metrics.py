"""Prometheus metrics of the n-gram sources: hits, and accepted tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from prometheus_client import Counter, Gauge

from freedraft.step import Step
from sssd_plugin.scoring.attribution import HITS, LOOKUPS, SIZE, SOURCES

if TYPE_CHECKING:
    from sssd_plugin.datastore.index.sub_index import Snapshot
    from sssd_plugin.drafter import Drafter

EVERY = 8  # sampling interval, in steps

_LOOKUPS = Counter("freedraft_lookups", f"Contexts drafted for, sampled in one step of {EVERY}")
_HITS = Counter("freedraft_hits", "Of these, contexts with their last 2 tokens in the source", ["source"])
_SOURCED = Counter(
    "freedraft_sourced_tokens",
    f"Accepted draft tokens, sampled in one step of {EVERY}, by the source with the longest context",
    ["source"],
)
_STATIC_TOKENS = Gauge("freedraft_static_tokens", "Tokens in the built datastore", multiprocess_mode="livemax")
_STATIC_SUB_INDICES = Gauge(
    "freedraft_static_sub_indices", "Sub-indices of the built datastore", multiprocess_mode="livemax"
)


class SourceMetrics:
    """Counts look-ups, hits and accepted tokens by source of one drafter."""

    def __init__(self, static: Snapshot) -> None:
        self._steps = 0
        self._hits = [_HITS.labels(source) for source in SOURCES]
        self._sourced = [_SOURCED.labels(source) for source in (*SOURCES, "other")]
        self.set_static(static)

    def set_static(self, static: Snapshot) -> None:
        _STATIC_TOKENS.set(static.n_tokens)
        _STATIC_SUB_INDICES.set(len(static.sub_indices))

    def update(self, drafter: Drafter, step: Step) -> None:
        """Count a step, after the drafter's update with its tokens."""
        self._steps += 1
        if self._steps % EVERY:
            return
        tally = np.zeros(SIZE, np.int64)
        drafter.attribute(step.request_ids, step.gained, tally)
        _LOOKUPS.inc(int(tally[LOOKUPS]))
        for counter, number in zip((*self._hits, *self._sourced), tally[HITS:].tolist(), strict=True):
            counter.inc(number)
