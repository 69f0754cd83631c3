"""`Recipes`: the recipes of a selection, that is skip sets with windows, and which of them a step may draft with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from freedraft.draft_pass import Window
from layerskip_plugin.lookahead.base import Candidate
from layerskip_plugin.skip_set import SkipSet


class Recipes:
    """Every skip set with every window: ascending; None, the whole cache, last."""

    def __init__(self, skip_sets: Iterable[SkipSet], windows: Sequence[Window | None], page_size: int) -> None:
        self._windows, self._page_size = windows, page_size
        self.use(skip_sets)

    def use(self, skip_sets: Iterable[SkipSet]) -> None:
        """Replace all skip sets."""
        # A pass that leaves out nothing is a step of the model: no choice where there is another one.
        short = [w for w in self._windows if w is not None or len(self._windows) == 1]
        self._of = {s: [replace(s, window=window) for window in (self._windows if s else short)] for s in skip_sets}

    @property
    def all(self) -> list[SkipSet]:
        """Every recipe, those of one skip set together."""
        return [recipe for recipes in self._of.values() for recipe in recipes]

    def of(self, skip_set: SkipSet) -> list[SkipSet]:
        return self._of[skip_set]

    def applies(self, recipe: SkipSet, contexts: NDArray[np.int32]) -> NDArray[np.bool_]:
        """bool [B]: whether requests of these lengths draft with a recipe. Where no layers are skipped and the window
        holds the whole request, passes would do what the model does."""
        if recipe.window is None or recipe:
            return np.ones(len(contexts), np.bool_)
        return contexts > recipe.window.whole_up_to(self._page_size)

    def candidates(self, chosen: Sequence[SkipSet], contexts: NDArray[np.int32]) -> list[Candidate]:
        """The recipes that a round for R requests may run: of the chosen skip sets, with windows that are shorter than
        the longest request.

        Args:
            chosen: R skip sets, one for each request; contexts: int32 [R], tokens of each.
        """
        votes: dict[SkipSet, list[int]] = {}
        for row, skip_set in enumerate(chosen):
            votes.setdefault(skip_set, []).append(row)
        longest, found = int(contexts.max(initial=0)), []
        for skip_set, recipes in self._of.items():
            if skip_set not in votes:
                continue
            shorter = [r for r in recipes if r.window is None or r.window.whole_up_to(self._page_size) < longest]
            for recipe in shorter or (recipes[-1:] if skip_set else []):
                applies = self.applies(recipe, contexts)
                found.append(Candidate(recipe, int(applies[votes[skip_set]].sum()), int(applies.sum())))
        return [candidate for candidate in found if candidate.votes]
