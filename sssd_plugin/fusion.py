"""Candidates of all sources -> the best tree of n nodes, for a whole batch in one compiled call."""

from __future__ import annotations

import numpy as np
from numba import njit

from sssd_plugin.learned import draft_tree as learned_tree
from sssd_plugin.paper import draft_tree as paper_tree

LEARNED, PAPER = 0, 1


@njit(nogil=True, cache=True)
def _share(scores, counts, total):
    """Trim the trees to `total` draft nodes in all, the best ones.

    Nodes of a tree stand in order of falling score, so what is left of each is a prefix, and so a tree.
    """
    spare = -total
    for b in range(len(counts)):
        spare += max(counts[b] - 1, 0)
    while spare > 0:
        worst = -1
        for b in range(len(counts)):
            if counts[b] > 1 and (worst < 0 or scores[b, counts[b] - 1] < scores[worst, counts[worst] - 1]):
                worst = b
        counts[worst] -= 1
        spare -= 1


@njit(nogil=True, cache=True)
def draft_batch(
    scoring, slots, slot_ids, rows, bounds, store_sizes, groups, weights, max_nodes, total, chain, min_score,
    tokens, parents, depths, scores, counts, kinds, ints, floats, bytes_, no_features, no_ints, no_floats,
):  # fmt: skip
    """Fill a `DraftBatch` (tokens .. kinds) for the requests in `slot_ids`; at most `total` draft nodes in all.

    A slot of -1 gets a tree of 0 nodes. Request b drafts from the sub-indices `rows[bounds[g]:bounds[g + 1]]` (rows of
    `Snapshot.table`) with g = groups[b], which hold `store_sizes[g]` tokens.
    """
    for b in range(len(slot_ids)):
        table = rows[bounds[groups[b]] : bounds[groups[b] + 1]]
        store_size = store_sizes[groups[b]]
        if slot_ids[b] < 0:
            counts[b] = 0
        elif scoring == LEARNED:
            counts[b] = learned_tree(
                slots, slot_ids[b], table, store_size, weights, max_nodes, chain, min_score,
                tokens[b], parents[b], depths[b], scores[b], kinds[b],
                ints, floats, bytes_, no_features, no_ints[0], no_ints[0], no_ints, no_floats,
            )  # fmt: skip
        else:
            counts[b] = paper_tree(
                slots, slot_ids[b], table, max_nodes, chain, min_score,
                tokens[b], parents[b], depths[b], scores[b], kinds[b], ints, floats,
            )  # fmt: skip
    if total >= 0:
        _share(scores[: len(slot_ids)], counts[: len(slot_ids)], np.int64(total))
