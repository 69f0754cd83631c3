"""What a lookahead policy is, which says after each drafted token which requests draft one more; policies without
costs: a fixed number of tokens, a threshold of confidence, fixed or following acceptance."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from freedraft.cost.acceptance import PASS_KINDS
from freedraft.draft_pass import RestOfBatch
from layerskip_plugin.rounds import Candidate, Flags, Floats, Ints, Outcome
from layerskip_plugin.skip_set import SkipSet

ALONE = RestOfBatch(0, 0, None)
LEN_RATE = 0.1  # weight of the newest round in the mean length of rounds


class Lookahead(ABC):
    """How far to draft, decided for a whole batch after every position of a round of draft passes.

    A round: `choose` says which recipe all its passes have; `begin` with the requests that draft; then the draft passes
    of one position at a time, each followed by `should_continue` for the requests that took part (also after the last
    one allowed); after verification `record_acceptance`. `finish` when a request ends.

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
        Called once per step, with the number of all its requests and their mean tokens."""
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

    def record_acceptance(self, outcome: Outcome) -> None:
        """What verification said of the round."""

    def finish(self, request_id: str) -> None:
        """A request ended or was aborted; what is kept of it can go."""


class Fixed(Lookahead):
    """Draft `length` tokens, or as many as are allowed."""

    def __init__(self, length: int) -> None:
        self.length = length

    def expected_len(self) -> int:
        return min(self.length, self.max_draft_len)

    def should_continue(self, position: int, rows: Ints, top: Floats, entropy: Floats | None) -> Flags:
        return np.full(len(rows), position + 1 < self.expected_len())


class Confidence(Lookahead):
    """Go on while the draft token's top-1 probability is at least `threshold`; the token below it is kept.

    Draft & Verify and SWIFT use .8, KnapSpec .7.
    """

    needs_top = 1

    def __init__(self, threshold: float = 0.7) -> None:
        self.threshold = threshold

    def should_continue(self, position: int, rows: Ints, top: Floats, entropy: Floats | None) -> Flags:
        return (top[:, 0] >= self.threshold) & (position + 1 < self.max_draft_len)


class DraftVerify(Lookahead):
    """Draft & Verify's threshold (Zhang et al. 2024, section 3.3), one per request.

    After each round of a request, with its acceptance rate a and the threshold g:
        rate <- memory * rate + (1 - memory) * a
        g <- inertia * g + (1 - inertia) * (g + step  if rate < target  else  g - step)
    A round that was cut by the length limit with everything accepted leaves g as it is. A new request starts from the
    running mean of those that ended.
    """

    needs_top = 1

    def __init__(
        self, threshold: float = 0.7, target: float = 0.9, memory: float = 0.5, step: float = 0.01, inertia: float = 0.9
    ) -> None:
        self.target, self.memory, self.step, self.inertia = target, memory, step, inertia
        self.first_threshold = threshold
        self.requests: dict[str, tuple[float, float]] = {}  # threshold and acceptance rate

    def begin(self, request_ids: Sequence[str], recipe: SkipSet, max_draft_len: int, rest: RestOfBatch = ALONE) -> None:
        super().begin(request_ids, recipe, max_draft_len, rest)
        for request in request_ids:
            self.requests.setdefault(request, (self.first_threshold, self.target))
        self.thresholds = np.array([self.requests[request][0] for request in request_ids])

    def should_continue(self, position: int, rows: Ints, top: Floats, entropy: Floats | None) -> Flags:
        return (top[:, 0] >= self.thresholds[rows]) & (position + 1 < self.max_draft_len)

    def record_acceptance(self, outcome: Outcome) -> None:
        some = [i for i, request in enumerate(outcome.request_ids) if outcome.verified[i] and request in self.requests]
        if not some:
            return
        names = [outcome.request_ids[i] for i in some]
        drafted, accepted = outcome.verified[some], outcome.accepted[some]
        threshold, rate = np.array([self.requests[request] for request in names]).T
        rate = self.memory * rate + (1 - self.memory) * accepted / drafted
        cut = (drafted >= self.max_draft_len) & (accepted == drafted)
        change = np.where(rate < self.target, self.step, np.where(cut, 0.0, -self.step))
        threshold = np.clip(threshold + (1 - self.inertia) * change, 0.0, 1.0)
        self.requests.update(zip(names, zip(threshold.tolist(), rate.tolist(), strict=True), strict=True))

    def finish(self, request_id: str) -> None:
        threshold, _ = self.requests.pop(request_id, (self.first_threshold, 0.0))
        self.first_threshold += 0.1 * (threshold - self.first_threshold)
