"""Sources of verified and accepted draft tokens, by the kinds of their nodes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freedraft.compiled import compiled
from freedraft.cost.acceptance import PASS_KINDS
from freedraft.draft import DraftBatch
from freedraft.step import Step, rows_in
from sssd_plugin.options import Scoring
from sssd_plugin.scoring.candidates import ORDERS
from sssd_plugin.scoring.learned import KINDS

SOURCES = ("input", "store", "other")
INPUT, STORE, OTHER = range(len(SOURCES))


@compiled(nogil=True)
def _count(totals, source_of, draft, step):
    tokens, parents, kinds, counts = draft
    rows, drafted, new, starts, ends = step
    for b in range(len(rows)):
        row = rows[b]
        n = counts[row] if row >= 0 else 0
        for i in range(1, drafted[b] + 1):
            totals[0, source_of[kinds[row, i]] if i < n else OTHER] += 1
        node = 0
        for at in range(starts[b], starts[b] + min(ends[b] - starts[b] - 1, drafted[b])):
            i = node + 1
            while i < n and not (parents[row, i] == node and tokens[row, i] == new[at]):
                i += 1
            totals[1, source_of[kinds[row, i]] if i < n else OTHER] += 1
            node = i


class Origins:
    """Counts the tokens of every step by the source that held the longest context of their node, up to four tokens.

    Attributes:
        totals: int64 [2, 3], verified and accepted draft tokens by SOURCES. Of drafts that are no longer known: other.
    """

    def __init__(self, scoring: Scoring) -> None:
        kinds = np.arange(PASS_KINDS)
        store, request = (kinds == 0, kinds) if scoring == "paper" else np.divmod(kinds % KINDS, ORDERS + 1)
        self._source_of = np.select([store > request, request > 0], [STORE, INPUT], OTHER)
        self.totals = np.zeros((2, len(SOURCES)), np.int64)
        self.follow((), DraftBatch.empty(0, 1))
        none = np.zeros(0, np.int32)
        self._count(none, none, none, none.astype(np.int64), none.astype(np.int64))  # compile it, or load it

    def follow(self, request_ids: Sequence[str], draft: DraftBatch) -> None:
        """Remember the newest drafts of these requests. Their arrays, except counts, must not change before `count`."""
        self._request_ids, self._draft = list(request_ids), draft

    def count(self, step: Step) -> None:
        """Count what the last step verified and accepted of the drafts passed to `follow`."""
        self._count(rows_in(self._request_ids, step.request_ids), step.drafted, step.tokens, step.starts, step.ends)

    def _count(self, *step: NDArray[Any]) -> None:
        draft = self._draft
        _count(self.totals, self._source_of, (draft.tokens, draft.parents, draft.kinds, draft.counts), step)
