"""Candidates of all sources -> the best tree of n nodes, for a whole batch in one compiled call."""

from __future__ import annotations

from numba import njit

from sssd_plugin.request_index import request_at
from sssd_plugin.scoring import candidates, learned, paper
from sssd_plugin.scoring.views import Store, Tree


@njit(nogil=True, cache=True)
def draft_batch(
    slots, slot_ids, table, bounds, sizes, groups, max_nodes, chain, min_score, trees, weights, learned_scratch,
    paper_scratch,
):  # fmt: skip
    """Fill a `DraftBatch` for the requests in `slot_ids`; a slot of -1 gets a tree of 0 nodes.

    Bundles cross from Python as plain tuples, which are faster there than named ones.

    Args:
        slots: `RequestIndex.slots`; slot_ids: int64 [B].
        table, bounds, sizes: of a `View`; groups: int64 [B], whose sub-indices each request drafts from.
        max_nodes, chain, min_score: as in `learned.draft_tree`.
        trees: the arrays of the `DraftBatch`, in its order.
        weights, learned_scratch, paper_scratch: what the learned scorer needs, and the paper's; those of the one that
            is not used are None.
    """
    tokens, parents, depths, scores, counts, kinds = trees
    for b in range(len(slot_ids)):
        counts[b] = 0
        if slot_ids[b] < 0:
            continue
        request = request_at(slots, slot_ids[b])
        group = groups[b]
        store = Store(table[bounds[group] : bounds[group + 1]], sizes[group])
        tree = Tree(tokens[b], parents[b], depths[b], scores[b], kinds[b])
        if learned_scratch is not None:
            counts[b] = learned.draft_tree(
                request, store, weights, max_nodes, chain, min_score, tree, candidates.Scratch(*learned_scratch), None
            )
        if paper_scratch is not None:
            counts[b] = paper.draft_tree(
                request, store.table, max_nodes, chain, min_score, tree, paper.Scratch(*paper_scratch)
            )
