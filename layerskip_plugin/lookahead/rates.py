"""Results of drafting with one recipe: how far drafts went, and how much was accepted."""

from __future__ import annotations

import numpy as np

from layerskip_plugin.rounds import Outcome

MAX_DRAFT_LEN = 64
MEMORY = 64.0  # rounds after which a round's weight is 1/e
PRIOR_WEIGHT = 6.0  # weight of the prior, in rounds


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
        self.weight = PRIOR_WEIGHT

    def update(self, outcome: Outcome) -> None:
        """Drafted tokens count even if the engine or a controller did not verify them: their passes were run."""
        places, new = np.arange(MAX_DRAFT_LEN), len(outcome.drafted)
        self.weight = min(self.weight * np.exp(-new / MEMORY), MEMORY) + new
        of_places = (self.reached, outcome.drafted), (self.verified, outcome.verified), (self.accepted, outcome.path)
        for share, tokens in of_places:
            share += ((tokens[:, None] > places).mean(0) - share) * (new / self.weight)
