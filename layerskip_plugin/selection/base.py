"""A selection decides which skip set suits each request."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from layerskip_plugin.skip_set import SkipSet

logger = logging.getLogger("freedraft.layerskip")

Evaluate = Callable[[Sequence[SkipSet]], NDArray[np.float64]]
"""Matchness of each set: the share of the newest tokens of the traffic on which its top-1 choice is the whole model's,
with the whole model's KV of the past; one batched forward."""
Requested = Sequence[str | None]  # the name of the set that each request asks for; empty when none does
Hidden = NDArray[np.float32] | None  # [B, hidden size], the normed last hidden state of each prompt's last token
Counts = NDArray[np.int32]  # [B], a number per request


class Selection(ABC):
    """Decides which sublayers the drafts of each running request should skip; a round takes one set for all.

    `begin` is called once per request behind its prefill, `choose` at every round, `finish` when the request ends.
    """

    needs_hidden: bool = False  # `begin` needs the last hidden state of each prompt
    searches: bool = False  # on the tokens of running requests

    @abstractmethod
    def sets(self) -> dict[str, SkipSet]:
        """The sets that `choose` may return now, by name."""

    def begin(self, request_ids: Sequence[str], requested: Requested = (), hidden: Hidden = None) -> None:
        """Take in requests that are about to draft for the first time."""

    @abstractmethod
    def choose(self, request_ids: Sequence[str], contexts: Counts) -> list[SkipSet]:
        """The set of each request; `contexts`: the tokens of each so far."""

    def max_lengths(self, contexts: Counts) -> Counts | None:
        """Draft length limit at each context length; None leaves it to the lookahead policy."""
        return None

    def finish(self, request_ids: Sequence[str]) -> None:
        """Forget requests that have ended."""


class Static(Selection):
    """Serves fixed sets: each request has the one that it asks for by name, else the first."""

    def __init__(self, sets: Mapping[str, SkipSet]) -> None:
        self._sets = dict(sets)
        self.asked: dict[str, SkipSet] = {}
        self.warned = False

    def sets(self) -> dict[str, SkipSet]:
        return self._sets

    def begin(self, request_ids: Sequence[str], requested: Requested = (), hidden: Hidden = None) -> None:
        for request, name in zip(request_ids, requested, strict=False):
            if isinstance(name, str) and name in self._sets:  # clients send anything
                self.asked[request] = self._sets[name]
            elif name is not None and not self.warned:
                self.warned = True
                known = ", ".join(self._sets)
                logger.warning("freedraft: there is no skip set '%s', only %s: the first is used", name, known)

    def choose(self, request_ids: Sequence[str], contexts: Counts) -> list[SkipSet]:
        first = next(iter(self._sets.values()))
        return [self.asked.get(request, first) for request in request_ids]

    def finish(self, request_ids: Sequence[str]) -> None:
        for request in request_ids:
            self.asked.pop(request, None)
