"""Copies drafts of model runner V2 to the device, as tokens and ancestor masks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from freedraft.compiled import compiled
from freedraft.draft import DraftBatch


def write_drafts(
    draft: DraftBatch | None,
    capacities: NDArray[np.int32],
    rows: NDArray[np.intp],
    branches: NDArray[np.bool_] | None,
    proposed: NDArray[np.int64],
    parents: NDArray[np.int32],
    slots: NDArray[np.int32],
) -> NDArray[np.int32]:
    """Write drafts into rows of `proposed`; return int32 [R], draft tokens of each request.

    Args:
        draft: of R requests, or None; nodes of a tree by descending score. capacities: int32 [R], most draft tokens of
            each.
        branches: bool [R], whether a request may have a tree; others keep the chain of first children. None: no request
            may.
        proposed: int64 [1 or 2, B, K], out: tokens, and masks (`NodeMasks`) if there may be trees; prefilled with each
            request's newest token and 0.
        parents: int32 [slots, K + 1], out, by `slots`: int32 [R].
    """
    counts = np.zeros(len(rows), np.int32)
    if draft is not None:
        length = parents.shape[1] - 1
        _write(
            draft.tokens,
            draft.parents,
            np.minimum(np.minimum(draft.counts - 1, capacities), length).clip(0).astype(np.int32),
            rows,
            np.zeros(len(rows), np.bool_) if branches is None else branches,
            proposed[0],
            proposed[-1],
            parents,
            slots,
            counts,
        )
    return counts


@compiled
def _write(tokens, parents, limits, rows, branches, out, masks, out_parents, slots, counts):
    for b in range(len(rows)):
        row, slot = rows[b], slots[b]
        out_parents[slot, 0] = -1
        kept, last = 0, 0
        for node in range(1, limits[b] + 1):
            if not branches[b]:
                if parents[b, node] != last:
                    continue
                last = node
            out[row, kept] = tokens[b, node]
            parent = parents[b, node] if branches[b] else kept
            out_parents[slot, kept + 1] = parent
            if branches[b]:
                above = masks[row, parent - 1] if parent > 0 else np.int64(0)
                masks[row, kept] = above | (np.int64(1) << np.int64(kept))
            kept += 1
        counts[b] = kept
