"""Drafts for the requests of a batch, by either scorer."""

from freedraft.compiled import compiled
from sssd_plugin.recycled_logits import Recycled
from sssd_plugin.request_index import request_at
from sssd_plugin.scoring import candidates, learned, paper
from sssd_plugin.scoring.views import Limits, Tree, store_of


@compiled(nogil=True)
def draft_batch(arrays, slots, view, entries, limits, weights):
    """Fill a `DraftBatch`; a slot of -1 gets a tree of 0 nodes. Only the scorer in use is compiled.

    Bundles are passed from Python as plain tuples, which numba unpacks faster than named ones.

    Args:
        arrays: int64 [B] each, slots, groups in the view, owners of recycled logits; those of the `DraftBatch`.
        slots: `RequestIndex.slots`.
        view: see `views.store_of`, then `View.widest`; entries: of recycled logits, none to draft without.
        limits: as of `Limits`; weights: layer and out, as in `Weights`; None for the paper's scorer.
    """
    slot_ids, groups, owners, tokens, parents, depths, scores, counts, kinds = arrays
    bounds = Limits(*limits)
    if weights is None:
        tries = paper.scratch()
    else:
        nodes = candidates.scratch(bounds.max_nodes, view[3])
    for b in range(len(slot_ids)):
        counts[b] = 0
        if slot_ids[b] >= 0:
            request, store = request_at(slots, slot_ids[b]), store_of(view[:3], groups[b])
            tree = Tree(tokens[b], parents[b], depths[b], scores[b], kinds[b])
            if weights is None:
                counts[b] = paper.draft_tree(request, store, bounds, tree, tries)
            else:
                sources = learned.Sources(request, store, Recycled(entries, owners[b]))
                counts[b] = learned.draft_tree(sources, weights, bounds, tree, nodes)
