"""Prometheus metrics of the n-gram sources: draft tokens and accepted tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from prometheus_client import Counter, Gauge

from freedraft.draft import DraftBatch
from sssd_plugin.scoring.attribution import SOURCES

if TYPE_CHECKING:
    from sssd_plugin.datastore.index.sub_index import Snapshot
    from sssd_plugin.drafter import Drafter

EVERY = 32  # sampling interval, in steps

_BY = f"sampled in one step of {EVERY}, by the source with the longest context"
_SOURCED = Counter("freedraft_sourced_tokens", f"Accepted draft tokens, {_BY}", ["source"])
_SOURCED_DRAFT = Counter("freedraft_sourced_draft_tokens", f"Draft tokens to verify, {_BY}", ["source"])
_STATIC_TOKENS = Gauge("freedraft_static_tokens", "Tokens in the built datastore", multiprocess_mode="livemax")
_STATIC_SUB_INDICES = Gauge(
    "freedraft_static_sub_indices", "Sub-indices of the built datastore", multiprocess_mode="livemax"
)


class SourceMetrics:
    """Counts accepted tokens and draft tokens of one drafter, by source."""

    def __init__(self, static: Snapshot) -> None:
        self._steps = 0
        self._counters = [family.labels(source) for family in (_SOURCED, _SOURCED_DRAFT) for source in SOURCES]
        self.set_static(static)

    def set_static(self, static: Snapshot) -> None:
        _STATIC_TOKENS.set(static.n_tokens)
        _STATIC_SUB_INDICES.set(len(static.sub_indices))

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
