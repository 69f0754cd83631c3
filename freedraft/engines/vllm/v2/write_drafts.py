"""Drafts of model runner V2 on their way to the device: tokens and ancestor masks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from freedraft.compiled import compiled
from freedraft.draft import DraftBatch
from freedraft.engines.vllm.v2.gained import GainedTokens
from freedraft.engines.vllm.v2.requests import Requests, Taken


def write_drafts(
    draft: DraftBatch | None, taken: Taken, gained: GainedTokens, requests: Requests, proposed: NDArray[np.int64],
    branching: NDArray[np.bool_] | None, number: int,
) -> NDArray[np.int32]:  # fmt: skip
    """Write drafts after a step into `proposed`, and what was drafted into `requests`; return int32 [R], draft tokens
    of each of the R requests of `taken`.

    Args:
        draft: of R requests, or None.
        proposed: int64 [slots, 1 or 2, K], out: tokens, and masks (`NodeMasks`) if there may be trees; without a draft
            token, a request's newest one and 0.
        branching: bool [slots], which requests may have trees; others keep the chain of first children. None: none.
        number: of the step, for `Requests.drafted_behind`.
    """
    counts, draft = np.zeros(len(taken.rows), np.int32), draft or DraftBatch.empty(0, 1)
    _write(
        (draft.tokens, draft.parents, draft.counts),
        (taken.rows, taken.capacities, gained.wait(), gained.slots),
        (requests.state, requests.no_trees if branching is None else branching, requests.parents),
        (proposed, counts),
        number,
    )
    return counts


@compiled
def _write(draft, taken, of_slots, out, number):
    tokens, parents, nodes = draft
    rows, capacities, gained, slots = taken
    state, branching, all_parents = of_slots
    (all_tokens, all_masks), counts = (out[0][:, 0], out[0][:, -1]), out[1]
    for row, slot in enumerate(slots):
        all_masks[slot] = 0  # without trees, these are the tokens
        all_tokens[slot] = gained[row, -1]
    for b in range(len(rows)):
        row = rows[b]
        slot = slots[row]
        proposed, masks = all_tokens[slot], all_masks[slot]
        kept, last, branches = 0, 0, branching[slot]
        limit = min(nodes[b], capacities[b] + 1) if b < len(nodes) else 0
        for node in range(1, limit):
            if not branches:
                if parents[b, node] != last:
                    continue
                last = node
            proposed[kept] = tokens[b, node]
            parent = parents[b, node] if branches else kept
            all_parents[slot, kept + 1] = parent
            if branches:
                above = masks[parent - 1] if parent > 0 else np.int64(0)
                masks[kept] = above | (np.int64(1) << np.int64(kept))
            kept += 1
        counts[b] = state[slot].drafted = kept
        state[slot].drafted_behind, state[slot].root, all_parents[slot, 0] = number, gained[row, -1], -1
