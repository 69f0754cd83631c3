"""Between an engine and a selection: which of the sets that the engine has built each running request drafts with."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from layerskip_plugin.selection.allowance import Allowance
from layerskip_plugin.selection.base import Selection, Static
from layerskip_plugin.skip_set import SkipSet

logger = logging.getLogger("freedraft.layerskip")

COMPILED = 4
"""Sets whose passes an engine compiles, or captures graphs of; the passes of others run uncompiled."""


class Selector:
    """Keeps by request what a selection is asked for once, and what it answered last.

    The engine builds `selection.sets()` when it starts, in this order; the places of its answers are places there. Only
    a selection that searches changes them later, and says so by `search`.

    Args:
        selection: decides.
        share: of serving time that its search may take.
    """

    def __init__(self, selection: Selection, share: float = 0.01) -> None:
        self.selection = selection
        self.allowance = Allowance(share)
        # One set for all, for ever: nothing to ask or to keep.
        self.fixed = isinstance(selection, Static) and len(selection.sets()) == 1
        self._place: dict[str, int] = {}

    @property
    def sets(self) -> dict[str, SkipSet]:
        """By name, in the order of the places that `choose` names."""
        return self.selection.sets()

    @property
    def needs_hidden(self) -> bool:
        """Whether `begin` wants hidden states."""
        return self.selection.needs_hidden

    @property
    def compiled(self) -> int:
        """How many of `sets`, from the first on, are to be compiled: those of a search are soon replaced."""
        return 0 if self.selection.searches else COMPILED

    def unknown(self, request_ids: Sequence[str]) -> list[int]:
        """Places in `request_ids` of the requests that have not begun."""
        if self.fixed or self._place.keys() >= set(request_ids):
            return []
        return [i for i, request in enumerate(request_ids) if request not in self._place]

    def begin(
        self, request_ids: Sequence[str], wanted: Sequence[Any] = (), hidden: NDArray[np.float32] | None = None
    ) -> None:
        """Requests behind their prefill; `wanted` and `hidden` as in `Selection.begin`."""
        self.selection.begin(request_ids, hidden, wanted)
        self._place.update(dict.fromkeys(request_ids, 0))

    def choose(self, request_ids: Sequence[str], context: NDArray[np.int32]) -> NDArray[np.intp]:
        """intp[B]: place of each request's set; `context`: int32[B] tokens so far."""
        if self.fixed:
            return np.zeros(len(request_ids), np.intp)
        places = self.selection.choose(request_ids, context)
        self._place.update(zip(request_ids, places.tolist(), strict=True))
        return places

    def last(self, request_ids: Sequence[str]) -> NDArray[np.intp]:
        """intp[B]: what `choose` said of each request last; its verdicts are about the drafts of that set."""
        return np.fromiter((self._place.get(request, 0) for request in request_ids), np.intp, len(request_ids))

    def lengths(self, context: NDArray[np.int32]) -> NDArray[np.int32] | None:
        """int32[B]: most tokens to draft, or None where the selection leaves it to the lookahead policy."""
        return self.selection.lengths(context)

    def observe(self, request_ids: Sequence[str], drafted: NDArray[np.int32], accepted: NDArray[np.int32]) -> None:
        """int32[B] tokens drafted, and how many of them were accepted."""
        self.selection.observe(request_ids, drafted, accepted)

    def finish(self, request_ids: Sequence[str]) -> None:
        """These requests ended."""
        self.selection.finish(request_ids)
        for request in request_ids:
            self._place.pop(request, None)

    def __len__(self) -> int:
        """Requests known."""
        return len(self._place)

    def search(self, ready: Callable[[], bool]) -> SkipSet | None:
        """Search on if there is time and something to search on; the new first set when it has changed.

        Args:
            ready: prepares what the selection's `evaluate` looks at; False when there is nothing to look at.
        """
        swift: Any = self.selection
        if not swift.searches or not swift.searching:
            return None
        if self.allowance.seconds < min(swift.batch_seconds, 0.9 * self.allowance.most) or not ready():
            return None
        with self.allowance.spending() as seconds:
            changed = swift.step(seconds, batches=1)
        if not changed:
            return None
        logger.info(
            "freedraft: a better skip set after %d candidates: %d of %d sublayers, %.0f %% of tokens as the model's",
            swift.candidates,
            len(swift.incumbent),
            2 * swift.incumbent.n_layers,
            100 * swift.matchness,
        )
        return swift.incumbent
