"""A round of draft passes: its candidates, drafts, verification outcome, and the record of its recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from freedraft.draft_model import Drafted
from freedraft.step import Step, rows_in
from layerskip_plugin.skip_set import SkipSet

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]

MAX_DRAFT_LEN = 64
_MEMORY = 64.0  # rounds of a recipe after which a round's weight is 1/e
_PRIOR_WEIGHT = 6.0  # weight of the prior, in rounds


class Candidate(NamedTuple):
    recipe: SkipSet
    votes: int  # requests with its skip set
    requests: int  # that would draft with it


class Round:
    def __init__(self, request_ids: Sequence[str], recipe: SkipSet, depth: int, top_k: int) -> None:
        batch = len(request_ids)
        self.request_ids, self.recipe = request_ids, recipe
        self.tokens = np.zeros((batch, depth, top_k), np.int32)  # best first at each position
        self.probabilities = np.zeros((batch, depth, top_k), np.float32)
        self.entropy = np.zeros((batch, depth), np.float32)
        self.drafted = np.zeros(batch, np.int32)  # positions drafted

    def take(self, drafted: Drafted, rows: NDArray[np.intp], position: int) -> None:
        """Store the drafts of passes from `position` on for the requests at `rows`."""
        for i, tokens in enumerate(drafted.tokens, position):
            self.tokens[rows, i], self.probabilities[rows, i] = tokens, drafted.probabilities[i - position]
            if drafted.entropy is not None:
                self.entropy[rows, i] = drafted.entropy[i - position]

    def outcome(self, step: Step) -> Outcome | None:
        """The outcome in the step that verified the round; None if no request with drafts is left."""
        rows = rows_in(step.request_ids, self.request_ids)
        before = np.flatnonzero((self.drafted > 0) & (rows >= 0))
        if not len(before):
            return None
        now = rows[before]
        # The chain comes first in a tree, so a cut by the engine or a controller removes its end.
        verified = np.minimum(self.drafted[before], step.drafted[now])
        chain = self.tokens[before, :, 0]
        positions = np.arange(chain.shape[1])
        place = step.starts[now][:, None] + positions
        # The last new token is the bonus, not a draft token.
        inside = (place < step.ends[now][:, None] - 1) & (positions < verified[:, None])
        same = inside & (step.tokens[np.minimum(place, len(step.tokens) - 1)] == chain)
        return Outcome(
            self.recipe,
            [self.request_ids[i] for i in before.tolist()],
            drafted=self.drafted[before],
            verified=verified,
            accepted=np.cumprod(same, 1).sum(1).astype(np.int32),
            path=step.accepted[now],
            top=self.probabilities[before],
            entropy=self.entropy[before],
        )


class Outcome(NamedTuple):
    """Verification of the drafts of R requests. An accepted sibling ends the chain before it."""

    recipe: SkipSet  # of the round
    request_ids: Sequence[str]
    drafted: Ints  # [R], drafted tokens of the chain
    verified: Ints  # [R], of them
    accepted: Ints  # [R], of them
    path: Ints  # [R], accepted draft tokens, siblings included
    top: Floats  # [R, D, K], largest probabilities at each position, descending
    entropy: Floats  # [R, D], in nats

    def judged(self) -> tuple[NDArray[np.intp], NDArray[np.intp], Flags]:
        """The accepted tokens, and the first rejected one of each request; later ones had a wrong context. Returns row
        intp [N], position intp [N], accepted bool [N]; by request, then by position."""
        counts = np.minimum(self.verified, self.accepted + 1)
        row, position = np.nonzero(np.arange(self.entropy.shape[1]) < counts[:, None])
        return row, position, position < self.accepted[row]


class RecipeRecord:
    """Results of drafting with one recipe.

    Attributes:
        kind: of its tokens in `DraftBatch.kinds`.
        reached, verified, accepted: float64 [MAX_DRAFT_LEN], per place in the draft the share of rounds in which a
            token was drafted, verified, and accepted there.
    """

    def __init__(self, prior: float, kind: int) -> None:
        self.kind = kind
        self.reached = np.power(prior, np.arange(MAX_DRAFT_LEN), dtype=np.float64)
        self.verified, self.accepted = self.reached.copy(), prior * self.reached
        self.weight = _PRIOR_WEIGHT

    def update(self, outcome: Outcome) -> None:
        """Drafted tokens count even if the engine or a controller did not verify them: their passes were run."""
        places, new = np.arange(MAX_DRAFT_LEN), len(outcome.drafted)
        self.weight = min(self.weight * np.exp(-new / _MEMORY), _MEMORY) + new
        of_places = (self.reached, outcome.drafted), (self.verified, outcome.verified), (self.accepted, outcome.path)
        for share, tokens in of_places:
            share += ((tokens[:, None] > places).mean(0) - share) * (new / self.weight)
