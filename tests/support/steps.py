"""Decoding steps and drafts without an engine."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from freedraft.draft import DraftBatch
from freedraft.step import Step


def make_step(
    request_ids: Sequence[str],
    gained: Sequence[ArrayLike],
    *,
    contexts: ArrayLike = 300,
    capacities: ArrayLike = 64,
    drafted: ArrayLike = 0,
    previous: tuple[int, int] | None = None,
    texts: Sequence[ArrayLike] | None = None,
    trees: bool = False,
) -> Step:
    """A step in which these requests gained these tokens; `texts`, all tokens of each, say the contexts if given.
    trees: whether drafts may be trees."""
    count = len(request_ids)
    parts = [np.asarray(tokens, np.int32).reshape(-1) for tokens in gained]
    ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
    starts = ends - np.array([len(part) for part in parts], np.int64)
    if texts is not None:
        contexts = [len(text) for text in texts]

    def fill(values: ArrayLike) -> np.ndarray:
        return np.broadcast_to(np.asarray(values, np.int32), (count,)).copy()

    return Step(
        request_ids=list(request_ids),
        tokens=np.concatenate([*parts, np.zeros(0, np.int32)]),
        starts=starts,
        ends=ends,
        contexts=fill(contexts),
        capacities=fill(capacities),
        drafted=fill(drafted),
        previous=previous,
        history=lambda b: np.asarray(texts[b] if texts is not None else parts[b], np.int32),
        trees=np.full(count, trees),
    )


def chains(p: Sequence[Sequence[float]], kinds: int = 0) -> DraftBatch:
    """Chains of nodes with these probabilities given their parents; token i at depth i."""
    draft = DraftBatch.empty(len(p), 1 + max(map(len, p), default=0))
    draft.tokens[:] = draft.depths[:] = np.arange(draft.max_nodes)
    draft.parents[:], draft.kinds[:], draft.scores[:, 0] = draft.depths - 1, kinds, 1.0
    for b, row in enumerate(p):
        draft.counts[b], draft.scores[b, 1 : len(row) + 1] = len(row) + 1, np.cumprod(row)
    return draft
