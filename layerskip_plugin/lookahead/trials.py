"""`Trials`: rounds that do not seem to pay, or not to be the best, since what is never tried is never known."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from freedraft.cost.probes import ProbeSchedule
from layerskip_plugin.lookahead.base import Ints
from layerskip_plugin.lookahead.rates import RecipeRecord
from layerskip_plugin.skip_set import SkipSet

# Steps between trials of drafting although no length seems to pay, at first and at most.
FIRST_PROBE, RAREST_PROBE = 128, 256
# Rounds between trials of another recipe than the best, at first and at most.
FIRST_OTHER, RAREST_OTHER = 16, 256
# Surprise: tokens that a trial brings beyond its estimate; or a share `GOOD` of its tokens accepted where less than
# `DOUBTFUL` was expected: one token cannot exceed that by much.
SURPRISE, GOOD, DOUBTFUL = 0.5, 0.9, 0.7
# Trials that follow a surprise at once, half of them forfeited by one that is not `GOOD`, and the rounds that the
# record of the recipe then counts for: the text has changed.
MORE_TRIALS, DOUBTED_WEIGHT = 8, 3.0
# Rounds of each recipe that are tried at once at new batches and contexts: until then, what a pass takes there is a
# guess, and the first one of its kind, which warms up, is not timed.
FIRST_TRIALS = 3


class Trials:
    """Which rounds are trials, and with which recipe."""

    def __init__(self) -> None:
        self.wanted = False  # whether another trial is to follow the last one at once
        self._recipe: SkipSet | None = None
        self._left = 0
        self._probes = ProbeSchedule(FIRST_PROBE, RAREST_PROBE)
        self._others = ProbeSchedule(FIRST_OTHER, RAREST_OTHER)
        self._tried: Counter[tuple[SkipSet, int]] = Counter()

    def forget(self) -> None:
        """All recipes are new, and to be tried at once."""
        self._tried.clear()
        self.wanted = True

    def next(self, recipes: Sequence[SkipSet], row: int, *, forced: bool = False) -> SkipSet | None:
        """The recipe to try in a step that is not expected to pay; None: nothing is tried.

        Args:
            recipes: that the step may draft with.
            row: of its batch and context, see `row_of`.
            forced: whether one has to be tried.
        """
        if not (self.wanted and self._recipe in recipes):
            untried = (recipe for recipe in recipes if self._tried[recipe, row] < FIRST_TRIALS)
            if not forced and (first := next(untried, None)) is not None:
                self._recipe = first
                self._tried[first, row] += 1
            elif self.wanted or forced or self._probes.due():
                self._take_turns(recipes)
            else:
                return None
        self.wanted = False
        return self._recipe

    def beside(self, best: SkipSet, recipes: Sequence[SkipSet]) -> SkipSet:
        """The recipe of a round that is expected to pay: the best, and now and then another one in its turn."""
        self._probes.reset()
        self.wanted = False
        return self._take_turns(recipes) if len(recipes) > 1 and self._others.due() else best

    def _take_turns(self, recipes: Sequence[SkipSet]) -> SkipSet:
        last = recipes.index(self._recipe) if self._recipe in recipes else -1
        self._recipe = recipes[(last + 1) % len(recipes)]
        return self._recipe

    def judge(
        self, record: RecipeRecord, drafted: Ints, accepted: Ints, *, paid: bool, could_pay: Callable[[], bool]
    ) -> None:
        """Compare a round's int32 [R] drafted and accepted tokens with the recipe's record, before that is updated.

        Args:
            paid: whether the round was expected to pay.
            could_pay: whether such a round would pay if all were accepted.
        """
        length, brought = drafted.mean(), accepted.mean()
        expected, well = record.accepted[: max(1, int(length))].sum(), brought >= GOOD * length
        surprise = brought > expected + SURPRISE or (well and expected < DOUBTFUL * length)
        if surprise and not paid and could_pay():
            self._left, record.weight = MORE_TRIALS, min(record.weight, DOUBTED_WEIGHT)
        elif paid or not well:
            self._left = 0 if paid else self._left - MORE_TRIALS // 2
        self.wanted, self._left = self._left > 0, max(self._left - 1, 0)
