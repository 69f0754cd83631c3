"""`Trials`: occasional rounds that are not expected to pay, or not to be the best, to keep estimates fresh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from freedraft.cost.probes import ProbeSchedule
from layerskip_plugin.rounds import Ints, RecipeRecord
from layerskip_plugin.skip_set import SkipSet

# Steps between trials of drafting while no length pays: first and longest interval.
FIRST_PROBE, RAREST_PROBE = 128, 256
# Rounds between trials of another recipe than the best: first and longest interval.
FIRST_OTHER, RAREST_OTHER = 16, 256
# Trials of each recipe at new batch sizes and contexts, where pass times are guesses; the first pass warms up and is
# not timed.
FIRST_TRIALS = 3
# A trial surprises with `SURPRISE` more tokens than expected, or with a share `GOOD` of accepted tokens where less than
# `DOUBTFUL` was expected, since a draft of one token cannot exceed expectations by much.
SURPRISE, GOOD, DOUBTFUL = 0.5, 0.9, 0.7
# Weight of a record, in rounds, after a surprise: the text has changed.
DOUBTED_WEIGHT = 3.0


class Trials:
    def __init__(self) -> None:
        self._again = False  # the last trial surprised, so another one follows at once
        self._last: SkipSet | None = None
        self._probes = ProbeSchedule(FIRST_PROBE, RAREST_PROBE)
        self._others = ProbeSchedule(FIRST_OTHER, RAREST_OTHER)
        self._tried: Counter[tuple[SkipSet, int]] = Counter()

    def trial(self, recipes: Sequence[SkipSet], row: int) -> SkipSet | None:
        """The recipe to try in a step that is not expected to pay; None: no trial.

        Args:
            recipes: possible recipes of the step.
            row: of its batch and context, see `row_of`.
        """
        again, self._again = self._again, False
        untried = next((recipe for recipe in recipes if self._tried[recipe, row] < FIRST_TRIALS), None)
        if again and self._last in recipes:
            return self._last
        if untried is not None:
            self._last = untried
            self._tried[untried, row] += 1
            return untried
        return self._take_turns(recipes) if self._probes.due() else None

    def beside(self, best: SkipSet, recipes: Sequence[SkipSet]) -> SkipSet:
        """The recipe of a round that is expected to pay: the best one, or occasionally another, in turns."""
        self._probes.reset()
        self._again = False
        return self._take_turns(recipes) if len(recipes) > 1 and self._others.due() else best

    def _take_turns(self, recipes: Sequence[SkipSet]) -> SkipSet:
        last = recipes.index(self._last) if self._last in recipes else -1
        self._last = recipes[(last + 1) % len(recipes)]
        return self._last

    def judge(self, record: RecipeRecord, drafted: Ints, accepted: Ints) -> None:
        """Compare a trial's int32 [R] drafted and accepted tokens with the recipe's record, before that is updated."""
        length, brought = drafted.mean(), accepted.mean()
        expected = record.accepted[: max(1, int(length))].sum()
        if brought > expected + SURPRISE or (brought >= GOOD * length and expected < DOUBTFUL * length):
            self._again, record.weight = True, min(record.weight, DOUBTED_WEIGHT)
