"""What a selection is: it says which skip set each request drafts with."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from layerskip_plugin.skip_set import SkipSet

Evaluate = Callable[[Sequence[SkipSet]], NDArray[np.float64]]
"""Matchness of each set: the share of the newest tokens of the traffic on which its top-1 choice is the whole model's,
with the whole model's KV of the past; one batched forward."""


class Selection(ABC):
    """Which sublayers each running request's drafts skip.

    `begin` once per request behind its prefill, `choose` at every round, `observe` after its verification, `finish`
    when it ends, `step` off the critical path.

    Attributes:
        needs_hidden: whether `begin` wants the last hidden state of each prompt.
    """

    needs_hidden: bool = False

    @abstractmethod
    def sets(self) -> tuple[SkipSet, ...]:
        """The sets that `choose` may name now."""

    def begin(self, request_ids: Sequence[str], hidden: NDArray[np.float32] | None = None) -> None:  # noqa: B027
        """Requests that are about to draft for the first time.

        Args:
            hidden: float32[B, hidden size], the normed last hidden state of each prompt's last token.
        """

    def choose(self, request_ids: Sequence[str], context: NDArray[np.int32]) -> NDArray[np.intp]:
        """intp[B]: place in `sets` of each request's set; `context`: int32[B] tokens so far."""
        return np.zeros(len(request_ids), np.intp)

    def observe(  # noqa: B027
        self, request_ids: Sequence[str], drafted: NDArray[np.int32], accepted: NDArray[np.int32]
    ) -> None:
        """int32[B] tokens drafted, and how many of them were accepted."""

    def finish(self, request_ids: Sequence[str]) -> None:  # noqa: B027
        """These requests ended."""

    def step(self, seconds: float) -> bool:
        """Search on for at most `seconds`; True when `sets` has changed."""
        return False


class Static(Selection):
    """One set for all."""

    def __init__(self, skip: SkipSet) -> None:
        self.skip = skip

    def sets(self) -> tuple[SkipSet, ...]:
        return (self.skip,)
