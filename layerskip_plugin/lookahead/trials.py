"""`Trials`: rounds that draft although no length seems to pay, since what is never tried is never known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from freedraft.cost.probes import ProbeSchedule
from freedraft.cost.step_times import row_of
from layerskip_plugin.lookahead.base import NONE, Ints
from layerskip_plugin.lookahead.recipe_record import RecipeRecord
from layerskip_plugin.lookahead.windows import Windows

FIRST_PROBE, RAREST_PROBE = 128, 256
"""Steps after which drafting is tried although no length seems to pay, at first and at most."""
SURPRISE, DOUBTED_WEIGHT = 0.5, 3.0
"""Tokens that such a trial must bring beyond what was expected of it for another one to follow at once, and the rounds
that what is known of the recipe then counts for: the text has changed."""
MORE_TRIALS, GOOD, DOUBTFUL = 8, 0.9, 0.7
"""Trials that follow after such a surprise at most; half of them are forfeited by one in which less than this share of
the tokens is accepted. As much is a surprise, too, where less than the last share was expected: one token cannot exceed
that by much."""
FIRST_TRIALS = 3
"""Rounds of each window that are tried at once at batches and contexts at which none was: until then, what a pass takes
there is a guess, and the first one of its kind, which warms up, is not timed."""


class Trials:
    """See above.

    Attributes:
        wanted: whether another trial is to follow the last one at once.
    """

    def __init__(self, windows: Windows) -> None:
        self.wanted = False
        self._windows, self._place, self._left = windows, NONE, 0
        self._probes = ProbeSchedule(FIRST_PROBE, RAREST_PROBE)
        self._tried: dict[tuple[int, int], int] = {}  # by skip set, batch and context

    def ask(self, place: int) -> None:
        """This recipe is to be tried next."""
        self._place, self.wanted = place, True

    def next(self, counts: NDArray[np.int64], contexts: Ints | None) -> int:
        """The recipe to try in this step; NONE: nothing is tried. To be asked once for each step that does not draft.

        Args:
            counts: int64 [S], requests by recipe; contexts: int32 [R], tokens of those that could draft; None: more
                than any window.
        """
        present = np.flatnonzero(counts)
        place = self._place if self.wanted and self._place in present else self._untried(counts, contexts)
        if place == NONE and (self.wanted or self._probes.due()):  # each in its turn
            place = int(present[np.searchsorted(present, self._place, side="right") % len(present)])
        self._place = self._place if place == NONE else place
        return place

    def _untried(self, counts: NDArray[np.int64], contexts: Ints | None) -> int:
        """One of these recipes that hardly was tried at such batches and contexts; NONE where all were."""
        context = np.inf if contexts is None else float(contexts.mean())
        for place in np.flatnonzero(counts).tolist():
            first = self._windows.first(np.array([place]))
            kind = int(first[0]), row_of(int(counts[place]), 1.0 if contexts is None else context)
            windows = int(self._windows.useful(first, np.array([context])).sum())
            if self._tried.get(kind, 0) < FIRST_TRIALS * max(windows, 1):
                self._tried[kind] = self._tried.get(kind, 0) + 1
                return int(place)
        return NONE

    def begin_round(self, *, pays: bool) -> None:
        """A round is drafted that is expected to pay, or else is a trial."""
        if pays:
            self._probes.reset()
        self.wanted = False

    def judge(
        self, record: RecipeRecord, drafted: Ints, accepted: Ints, *, paid: bool, could_pay: Callable[[], bool]
    ) -> None:
        """int32 [R], tokens that requests drafted with a recipe and of which so many were accepted; before `record`
        hears of them.

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
