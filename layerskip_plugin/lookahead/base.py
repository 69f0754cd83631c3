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
LEN_RATE = 0.1  # weight of the newest round in the mean length of rounds


class Candidate(NamedTuple):
    """A recipe that a round may run."""

    recipe: SkipSet
    votes: int  # requests with its skip set
    requests: int  # that would draft with it


class Lookahead(ABC):
    """How far to draft, decided for a whole batch after every position of a round of draft passes.

    A round: `choose` says which recipe all its passes have; `begin` with the requests that draft; then the draft passes
    of one position at a time, each followed by `should_continue` for the requests that took part (also after the last
    one allowed: policies learn from it); after verification `record_acceptance`. `finish` when requests end.

    The token just drafted is always kept and verified, however unlikely it looks: dropping it after it was sampled
    would change the distribution of what is accepted.
    """

    needs_top: int = 0  # largest probabilities of a token's distribution that `should_continue` wants
    needs_entropy: bool = False
    kind: int = PASS_KINDS  # of the present round's tokens, in `DraftBatch.kinds`
    _mean_len = 0.0

    def use(self, recipes: Sequence[SkipSet]) -> None:
        """Rounds run one of these recipes from now on; what was learnt of others is forgotten."""

    def choose(self, candidates: Sequence[Candidate], batch: int, context: float) -> SkipSet | None:
        """The recipe that a round of this step would run, by default that of most votes; None without candidates.
        Called once per step.

        Args:
            batch: all requests of the step; context: their mean tokens.
        """
        return max(candidates, key=lambda candidate: candidate.votes).recipe if candidates else None

    def begin(self, request_ids: Sequence[str], recipe: SkipSet, max_draft_len: int, rest: RestOfBatch = ALONE) -> None:
        """A round of `recipe` begins, of at most `max_draft_len` tokens for each of these requests; `rows` in
        `should_continue` are indices of them. `rest`: the other requests of the step."""
        self.max_draft_len = max_draft_len

    def expected_len(self) -> int:
        """Passes that may run before `should_continue` is asked of the first one: as many as recent rounds drafted."""
        return min(math.ceil(self._mean_len) or self.max_draft_len, self.max_draft_len)

    def end(self, length: int) -> None:
        """A round ends; tokens of its longest draft."""
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
            drafted, accepted: int32[B], tokens of the chain, without the bonus token.
            path: int32[B], tokens accepted, also beside the chain.
        """

    def finish(self, request_ids: Sequence[str]) -> None:
        """These requests ended or were aborted; what is kept of them can go."""


class RoundLog:
    """Features of the tokens drafted in the running round, until they are verified."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.begin((), 0)

    def begin(self, request_ids: Sequence[str], max_draft_len: int) -> None:
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
        """The tokens that have a verdict: those accepted, and the first rejected one of each request. What was drafted
        behind a rejected token says nothing: its context was wrong.

        Returns:
            features float32[N, width], position intp[N], accepted bool[N], place in `request_ids` intp[N]; by request,
            then by position.
        """
        rows = np.array([self.row.get(request, -1) for request in request_ids], np.intp)
        known = np.flatnonzero(rows >= 0)
        rows, drafted, accepted = rows[known], drafted[known], accepted[known]
        counts = np.minimum(np.minimum(drafted, accepted + 1), self.count[rows])
        place, position = np.nonzero(np.arange(self.features.shape[1]) < counts[:, None])
        return self.features[rows[place], position], position, position < accepted[place], known[place]
