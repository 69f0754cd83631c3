"""A selection decides which skip set suits each request."""

import logging
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from layerskip_plugin.skip_set import SkipSet

logger = logging.getLogger("freedraft.layerskip")

Counts = NDArray[np.int32]  # [B], a number per request


class Selection:
    """Decides which sublayers drafts of each running request should skip; a round uses one set for all.

    `begin` and `set_prompt_state` are called at most once per request, `choose` at every round, `finish` when the
    request ends.

    Attributes:
        sets: possible results of `choose`, by name.
        requests: the sets of running requests with another one than the first of `sets`.
    """

    needs_prompt_states = False
    optimized = 4  # number of first `sets` with compiled passes or captured graphs

    def __init__(self, sets: Mapping[str, SkipSet]) -> None:
        self.sets = dict(sets)
        self.requests: dict[str, SkipSet] = {}

    def begin(self, request_id: str, requested: object) -> None:
        """Add a request; requested: the client's value for the name of a set."""

    def set_prompt_state(self, request_id: str, state: NDArray[np.float32]) -> None:
        """float32 [H], the normed last hidden state of a prompt's last token."""

    def choose(self, request_ids: Sequence[str], contexts: Counts) -> list[SkipSet]:
        """The set of each request; contexts: tokens of each so far."""
        first = next(iter(self.sets.values()))
        return [self.requests.get(request_id, first) for request_id in request_ids]

    def max_lengths(self, contexts: Counts) -> Counts | None:
        """Draft length limit at each context length; None leaves it to the lookahead policy."""
        return None

    def finish(self, request_id: str) -> None:
        self.requests.pop(request_id, None)


class Static(Selection):
    """Fixed sets: each request uses the one that it names, else the first."""

    warned = False

    def begin(self, request_id: str, requested: object) -> None:
        if isinstance(requested, str) and requested in self.sets:  # clients may send any type
            self.requests[request_id] = self.sets[requested]
        elif requested and not self.warned:
            self.warned = True
            known = ", ".join(self.sets)
            logger.warning("freedraft: there is no skip set '%s', only %s: the first is used", requested, known)
