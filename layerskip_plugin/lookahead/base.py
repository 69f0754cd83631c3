"""What a lookahead policy is: it says after each drafted token which requests draft one more."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from freedraft.cost.acceptance import PASS_KINDS
from freedraft.draft_pass import RestOfBatch
from layerskip_plugin.skip_set import SkipSet

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]
ALONE = RestOfBatch(0, 0, None)
LEN_RATE = 0.1
"""Of the newest round in how long rounds are of late."""


class Candidate(NamedTuple):
    """A recipe that a round may run.

    Attributes:
        votes: requests whose own skip set it has; requests: all that would draft with it.
    """

    recipe: SkipSet
    votes: int
    requests: int


class Lookahead(ABC):
    """How far to draft, decided for a whole batch after every position of a round of draft passes.

    A round: `choose` says which recipe all its passes have; `begin` with the requests that draft; then the draft passes
    of one position at a time, each followed by `should_continue` for the requests that took part (also after the last
    one allowed: policies learn from it); after verification `record_acceptance`. `finish` when requests end. A policy
    belongs to one drafting thread.

    The token just drafted is always kept and verified, however unlikely it looks: dropping it after it was sampled
    would change the distribution of what is accepted. A policy therefore only says whether another one follows.

    Attributes:
        needs_top: how many of the largest probabilities of a drafted token's distribution `should_continue`
            wants (0, 1 or 10).
        needs_entropy: whether it wants the distribution's entropy, in nats.
    """

    needs_top: int = 0
    needs_entropy: bool = False

    kind: int = PASS_KINDS
    """What `DraftBatch.kinds` says of the tokens of the present round."""

    def use(self, recipes: Sequence[SkipSet]) -> None:
        """Rounds run one of these recipes from now on; what was learnt of others is forgotten."""

    def choose(self, candidates: Sequence[Candidate], batch: int, context: float) -> SkipSet | None:
        """The recipe that a round of this step would run: the one of most votes, unless a policy knows better; None
        without candidates. Called once per step.

        Args:
            batch: all requests of the step; context: tokens of each, the mean.
        """
        return max(candidates, key=lambda candidate: candidate.votes).recipe if candidates else None

    _mean_len = 0.0

    def begin(self, request_ids: Sequence[str], recipe: SkipSet, max_draft_len: int, rest: RestOfBatch = ALONE) -> None:
        """A round begins.

        Args:
            request_ids: those that draft; `rows` in `should_continue` are places in it.
            recipe: of its passes.
            max_draft_len: limit of the tokens drafted for one of them.
            rest: the other requests of the step.
        """
        self.max_draft_len = max_draft_len

    def expected_len(self) -> int:
        """How many tokens the round that has begun is expected to draft for a request, at most; so many passes may run
        before `should_continue` is asked of the first one. As many as rounds drafted of late, unless a policy knows
        better."""
        return min(math.ceil(self._mean_len) or self.max_draft_len, self.max_draft_len)

    def end(self, length: int) -> None:
        """A round ends, whose longest draft has so many tokens."""
        self._mean_len += (length - self._mean_len) * (LEN_RATE if self._mean_len else 1.0)

    @abstractmethod
    def should_continue(self, position: int, rows: Ints, top: Floats, entropy: Floats | None) -> Flags:
        """Which requests draft one more token.

        Args:
            position: place in the draft of the token just drafted, from 0.
            rows: int32[R], the requests that just drafted it.
            top: float32[R, needs_top], the largest probabilities, descending.
            entropy: float32[R] in nats; None unless `needs_entropy`.

        Returns:
            bool[R]; False everywhere once `position` is the last that is allowed.
        """

    def record_acceptance(self, request_ids: Sequence[str], drafted: Ints, accepted: Ints, path: Ints) -> None:
        """What verification said of the round.

        Args:
            request_ids: of length B, in any order; those that were not in the round are ignored.
            drafted: int32[B], tokens drafted.
            accepted: int32[B], how many of them were accepted; the bonus token does not count.
            path: int32[B], the same with a token beside the chain that was accepted behind them.
        """

    def finish(self, request_ids: Sequence[str]) -> None:
        """These requests ended or were aborted; what is kept of them can go."""


class RoundLog:
    """Features of the tokens drafted in the running round, until they are verified."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.begin((), 0)

    def begin(self, request_ids: Sequence[str], max_draft_len: int) -> None:
        """Forget the last round."""
        self.row = {request: i for i, request in enumerate(request_ids)}
        self.features = np.zeros((len(request_ids), max_draft_len, self.width), np.float32)
        self.count = np.zeros(len(request_ids), np.int32)

    def put(self, position: int, rows: Ints, features: Floats) -> None:
        """Note float32[R, width] of the tokens that `rows` drafted at `position`."""
        self.features[rows, position] = features
        self.count[rows] = position + 1

    def verified(
        self, request_ids: Sequence[str], drafted: Ints, accepted: Ints
    ) -> tuple[Floats, NDArray[np.intp], Flags, NDArray[np.intp]]:
        """The tokens that have a verdict: those accepted, and the first rejected one of each request.

        What was drafted behind a rejected token says nothing: its context was wrong.

        Returns:
            features float32[N, width], position intp[N], accepted bool[N], place in `request_ids` intp[N]; by request,
            then by position.
        """
        rows = np.array([self.row.get(request, -1) for request in request_ids], np.intp)
        known = np.flatnonzero(rows >= 0)
        rows, drafted, accepted = rows[known], np.asarray(drafted)[known], np.asarray(accepted)[known]
        counts = np.minimum(np.minimum(drafted, accepted + 1), self.count[rows])
        place, position = np.nonzero(np.arange(self.features.shape[1]) < counts[:, None])
        return self.features[rows[place], position], position, position < accepted[place], known[place]


def unit(name: str, value: float) -> float:
    """`value`, if it lies in [0, 1].

    Raises:
        ValueError: it does not.
    """
    if not 0 <= value <= 1:
        raise ValueError(f"lookahead: {name} must lie between 0 and 1, not {value}")
    return float(value)
