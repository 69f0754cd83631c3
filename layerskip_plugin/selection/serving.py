"""The engine's view of a selection: which of the sets that the engine has built each running request votes for."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from layerskip_plugin.selection.base import Hidden, Selection, Static
from layerskip_plugin.selection.online_search import OnlineSearch
from layerskip_plugin.skip_set import SkipSet

logger = logging.getLogger("freedraft.layerskip")

# Sets with compiled passes or captured graphs; the passes of others run uncompiled.
COMPILED = 4


class Selector:
    """Passes requests on to a selection, each of them once, and lets a search have its share of serving time."""

    def __init__(self, selection: Selection, share: float = 0.01) -> None:
        self.selection = selection
        self.budget = TimeBudget(share)
        # One set for all requests, for ever: there is nothing to ask.
        self.fixed = isinstance(selection, Static) and len(selection.sets()) == 1
        self._begun: set[str] = set()

    @property
    def sets(self) -> dict[str, SkipSet]:
        """The sets by name; only a search changes them."""
        return self.selection.sets()

    @property
    def compiled(self) -> int:
        """How many of `sets`, from the first on, are to be compiled: those of a search are soon replaced."""
        return 0 if self.selection.searches else COMPILED

    def begin(self, request_ids: Sequence[str], requests: Callable[[str], tuple[str | None, Hidden]]) -> None:
        """Begin those of these requests that have not begun; `requests` gives the set that one asks for by name, and
        the last hidden state [1, hidden size] of its prompt."""
        if self.fixed or self._begun.issuperset(request_ids):
            return
        for request_id in request_ids:
            if request_id not in self._begun:
                requested, hidden = requests(request_id)
                self.selection.begin([request_id], [requested], hidden)
        self._begun.update(request_ids)

    def finish(self, request_ids: Sequence[str]) -> None:
        self.selection.finish(request_ids)
        self._begun.difference_update(request_ids)

    def __len__(self) -> int:
        """Requests that have begun and not finished."""
        return len(self._begun)

    def search(self, ready: Callable[[], bool]) -> SkipSet | None:
        """Continue the search if there is time and text for it; return the new set when it has changed. ready: prepares
        what the selection's `evaluate` looks at; False when there is nothing to look at."""
        selection = self.selection
        if not isinstance(selection, OnlineSearch) or not selection.searching:
            return None
        if self.budget.seconds < min(selection.batch_seconds, 0.9 * self.budget.max_saved) or not ready():
            return None
        started = self.budget.clock()
        changed = selection.step()
        self.budget.saved -= self.budget.clock() - started
        if not changed:
            return None
        skip = selection.incumbent
        logger.info(
            "freedraft: a better skip set after %d candidates: %d of %d sublayers, %.0f %% of tokens as the model's",
            selection.candidates, len(skip), 2 * skip.n_layers, 100 * selection.matchness,
        )  # fmt: skip
        return skip


class TimeBudget:
    """Accrues a share of elapsed time (0.01 is 1 %), at most `max_saved` seconds: no long search follows a pause."""

    def __init__(
        self, share: float = 0.01, max_saved: float = 1.0, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.share, self.max_saved, self.clock = share, max_saved, clock
        self.saved, self.updated = 0.0, clock()

    @property
    def seconds(self) -> float:
        """Seconds that may be spent now; negative while the last search is not paid for yet."""
        now = self.clock()
        self.saved = min(self.max_saved, self.saved + self.share * (now - self.updated))
        self.updated = now
        return self.saved
