"""Sources of verified and accepted draft tokens, by the kinds of their nodes."""

import numpy as np

from freedraft.compiled import compiled
from freedraft.cost.acceptance import PASS_KINDS
from sssd_plugin.scoring.inputs import NODE_KINDS, REQUEST_ORDERS

SOURCES = ("request", "store", "other")
REQUEST, STORE, OTHER = range(len(SOURCES))


def sources_of_kinds(scoring):
    """Return the index in SOURCES of every kind: the source with the longest context of a node, up to four tokens."""
    kinds = np.arange(PASS_KINDS)
    store, request = (kinds == 0, kinds) if scoring == "paper" else np.divmod(kinds % NODE_KINDS, REQUEST_ORDERS + 1)
    return np.select([store > request, request > 0], [STORE, REQUEST], OTHER)


@compiled(nogil=True)
def count(totals, source_of, draft, rows, step):
    """Add to int64 [2, 3] what requests verified and accepted of their last drafts, by SOURCES. rows: int32 [B], of
    each request in the draft; -1: not known any more, so of source other. draft, step: as unpacked below."""
    (tokens, parents, counts, kinds), (drafted, new, starts, ends) = draft, step
    for b in range(len(rows)):
        row, node = rows[b], 0
        n = counts[row] if row >= 0 else 0
        for i in range(1, drafted[b] + 1):
            totals[0, source_of[kinds[row, i]] if i < n else OTHER] += 1
        for at in range(starts[b], starts[b] + min(ends[b] - starts[b] - 1, drafted[b])):
            i = node + 1
            while i < n and not (parents[row, i] == node and tokens[row, i] == new[at]):
                i += 1
            totals[1, source_of[kinds[row, i]] if i < n else OTHER] += 1
            node = i
