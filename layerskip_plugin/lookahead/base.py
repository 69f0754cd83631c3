"""`Lookahead`: a policy that decides after each drafted token which requests draft one more; those without costs."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from freedraft.cost.acceptance import PASS_KINDS
from freedraft.draft_model import PassOutputs
from layerskip_plugin.rounds import Candidate, Flags, Floats, Ints, Outcome
from layerskip_plugin.skip_set import SkipSet

LEN_RATE = 0.1  # weight of the newest round in the mean length of rounds


class Lookahead(ABC):
    """Decides draft lengths for a whole batch, after every position of a round of draft passes.

    A round: `choose` picks the recipe of its passes; `begin` gets the number of requests that draft; then draft passes,
    one position at a time, each followed by `should_continue` for the requests in it (also after the last one allowed);
    after verification `learn_outcome`.

    The token just drafted is always kept and verified, even if it looks unlikely: dropping it after sampling would
    change the distribution of accepted tokens.
    """

    outputs = PassOutputs()  # that `should_continue` needs
    reads_ahead = False  # whether passes run up to `expected_len` before the first `should_continue`
    read = 0  # positions of the present round run so far
    kind: int = PASS_KINDS  # of the present round's tokens, in `DraftBatch.kinds`
    _mean_len = 0.0

    def use(self, recipes: Sequence[SkipSet]) -> None:
        """Set the recipes of later rounds, and forget what was learnt of others."""

    def choose(self, candidates: Sequence[Candidate], batch: int, context: float) -> SkipSet | None:
        """The recipe for a round of this step, by default the one of most votes; None without candidates. Called once
        per step, with its batch size and mean context."""
        return max(candidates, key=lambda candidate: candidate.votes).recipe if candidates else None

    def begin(self, requests: int, recipe: SkipSet, max_draft_len: int, others: int) -> None:
        """Start a round. Each request drafts at most `max_draft_len` tokens. `rows` in `should_continue` index the
        round's requests. others: number of other requests in the step."""
        self.max_draft_len, self.read = max_draft_len, 0

    def expected_len(self) -> int:
        """Passes to run before the first call of `should_continue`: the mean length of recent rounds."""
        return min(math.ceil(self._mean_len) or self.max_draft_len, self.max_draft_len)

    def end(self, length: int) -> None:
        """End a round. length: tokens of its longest draft."""
        self._mean_len += (length - self._mean_len) * (LEN_RATE if self._mean_len else 1.0)

    @abstractmethod
    def should_continue(self, position: int, rows: Ints, top: Floats, entropy: Floats) -> Flags:
        """Which requests draft one more token.

        Args:
            position: place in the draft of the token just drafted, from 0.
            rows: int32[R], the requests that just drafted it.
            top: float32[R, K], the largest probabilities, descending, at least as many as `outputs` say.
            entropy: float32[R] in nats; undefined unless `outputs` ask for it.

        Returns:
            bool[R]; all False at the last allowed position.
        """

    def learn_outcome(self, outcome: Outcome) -> None:
        """Learn from the verification of the round."""


class FixedLength(Lookahead):
    def __init__(self, length: int) -> None:
        self.length = length

    def expected_len(self) -> int:
        return min(self.length, self.max_draft_len)

    def should_continue(self, position: int, rows: Ints, top: Floats, entropy: Floats) -> Flags:
        return np.full(len(rows), position + 1 < self.expected_len())


class Confidence(Lookahead):
    """Go on while the draft token's top-1 probability is at least `threshold` (SWIFT: .8, KnapSpec: .7)."""

    def __init__(self, threshold: float = 0.7) -> None:
        self.threshold = threshold

    def should_continue(self, position: int, rows: Ints, top: Floats, entropy: Floats) -> Flags:
        return (top[:, 0] >= self.threshold) & (position + 1 < self.max_draft_len)
