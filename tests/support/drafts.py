"""What every `DraftBatch` must be."""

from __future__ import annotations

from freedraft.draft import DraftBatch


def check_draft(draft: DraftBatch) -> None:
    """Raise `ValueError` at the first broken invariant."""
    shape = draft.tokens.shape
    if (
        any(a.shape != shape for a in (draft.parents, draft.depths, draft.scores, draft.kinds))
        or draft.counts.shape != shape[:1]
    ):
        raise ValueError("arrays of a DraftBatch differ in shape")
    for b in range(shape[0]):
        n = int(draft.counts[b])
        if not 0 <= n <= shape[1]:
            raise ValueError(f"row {b}: {n} nodes in room for {shape[1]}")
        if n == 0:
            continue
        if draft.parents[b, 0] != -1 or draft.depths[b, 0] != 0 or draft.scores[b, 0] != 1.0:
            raise ValueError(f"row {b}: node 0 is not a root (parent -1, depth 0, score 1)")
        siblings: set[tuple[int, int]] = set()
        for i in range(1, n):
            parent, token = int(draft.parents[b, i]), int(draft.tokens[b, i])
            if not 0 <= parent < i:
                raise ValueError(f"row {b} node {i}: parent {parent} does not come before it")
            if draft.depths[b, i] != draft.depths[b, parent] + 1:
                raise ValueError(f"row {b} node {i}: depth is not its parent's plus one")
            if token < 0:
                raise ValueError(f"row {b} node {i}: token {token} is negative")
            if not 0.0 <= draft.scores[b, i] <= draft.scores[b, parent] * (1 + 1e-6):
                raise ValueError(f"row {b} node {i}: score {draft.scores[b, i]} exceeds its parent's or is not >= 0")
            if (parent, token) in siblings:
                raise ValueError(f"row {b} node {i}: its parent has the child token {token} twice")
            siblings.add((parent, token))
