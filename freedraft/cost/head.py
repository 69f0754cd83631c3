"""`Head`: what is learnt of a drafter that n-grams are on top of."""

from __future__ import annotations

import numpy as np

from freedraft.step import Step

_RATE, _MEMORY = 0.02, 0.98  # of what is learnt of a head, and of what goes on behind


class Head:
    """Each step verifies the head's K draft tokens first. n-grams bring what they add behind these: a learnt share of
    their own expectation, since both must agree.

    Attributes:
        length: K. accepted: of these, on average.
    """

    def __init__(self, length: int) -> None:
        self.length, self.accepted = length, 0.7 * length
        self.tails = np.full(2, 4.0)  # tokens behind a head's: gained, and expected

    @property
    def share(self) -> float:
        """Of the tokens that n-grams expect behind the head's, how many come."""
        return float(self.tails[0] / self.tails[1])

    def learn(self, accepted: float) -> None:
        """accepted: tokens of the head's draft in a step, on average."""
        self.accepted += _RATE * (accepted - self.accepted)

    def learn_tails(self, step: Step, expected: float) -> None:
        """expected: tokens per request of a step that n-grams had expected behind the head's."""
        gained = np.clip(step.gained - 1 - self.length, 0, None).mean()
        self.tails = _MEMORY * self.tails + (gained, expected)
