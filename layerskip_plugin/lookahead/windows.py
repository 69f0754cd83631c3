"""`Windows`: with which of its windows a skip set drafts, of those that make a pass shorter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freedraft.cost.probes import ProbeSchedule
from freedraft.draft_pass import Recipe
from layerskip_plugin.lookahead.base import Flags, Ints, Places

FIRST_OTHER, RAREST_OTHER = 16, 256
"""Rounds after which another window than the best is tried, at first and at most."""


class Windows:
    """The recipes of a skip set, by window.

    Args:
        recipes: those of one skip set together, each with the same number of windows.
        per_set: how many.
        page_size: of the KV cache, in tokens.
    """

    def __init__(self, recipes: Sequence[Recipe], per_set: int, page_size: int = 1) -> None:
        self.per_set = per_set
        # Tokens up to which each recipe reads all of a request, and whether it skips anything.
        self._reads = np.array([np.inf if r.window is None else r.window.whole_up_to(page_size) for r in recipes])
        self._skips = np.zeros(len(recipes), np.bool_)
        for place, recipe in enumerate(recipes):
            self.replace_recipe(place, recipe)
        self._others = ProbeSchedule(FIRST_OTHER, RAREST_OTHER)
        self._turn = -1

    def replace_recipe(self, place: int, recipe: Recipe) -> None:
        """Another skip set with the same window."""
        self._skips[place] = len(recipe.attention) + len(recipe.mlp) > 0

    @property
    def limit(self) -> bool:
        """Whether any recipe reads less than the whole cache."""
        return bool(np.isfinite(self._reads).any())

    def first(self, places: Places) -> Places:
        """Of the same skip set, the recipe with the first window."""
        return places // self.per_set * self.per_set

    def useful(self, first: Places, contexts: NDArray[Any]) -> Flags:
        """bool [R, W]: for which windows of the skip set whose recipes begin at `first` a pass does less than the whole
        model does: the window is shorter than the request, or sublayers are skipped, and it is the widest of those that
        are not."""
        numbers = first[:, None] + np.arange(self.per_set)
        widest = self._reads[numbers] == self._reads[numbers].max(1, keepdims=True)
        return (self._reads[numbers] < contexts[:, None]) | (self._skips[numbers] & widest)

    def of_round(self, places: Places, contexts: Ints | None, *, pays: bool, again: bool) -> Places:
        """intp [R]: what the requests of a round draft with: their recipes, now and then with another window, each in
        its turn of those that are shorter than the request.

        Args:
            places: intp [R], their recipes; contexts: int32 [R], their tokens; None: more than any window.
            pays: whether the round is expected to pay; else it is a trial.
            again: whether it repeats the last trial, with the window of then.
        """
        again = again and not pays
        if self.per_set == 1 or (pays and not self._others.due()) or (again and self._turn < 0):
            return places
        self._turn += not again
        first = self.first(places)
        useful = self.useful(first, np.full(len(places), np.inf) if contexts is None else contexts)
        turn = self._turn % np.maximum(useful.sum(1), 1)
        window = (useful.cumsum(1) > turn[:, None]).argmax(1)
        return np.where(useful.any(1), first + window, places)
