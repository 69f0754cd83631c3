"""Rivals in `bench/replay.py`, and the form of a draft function."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freedraft.draft import DraftBatch

LIMITS = {"suffix": (64, 4.0, 0.0), "suffix-vllm": (24, 1.0, 0.1)}
"""Of ArcticInference: maximum match, draft tokens per matched token, minimum probability of a draft token."""
CHAINS_ONLY = ("suffix-vllm", "lookup")
Tokens = NDArray[np.int32]
DraftFunction = Callable[[str, Tokens, int], DraftBatch]
"""Drafts for the first n tokens of a row. Within a request, n rises from the length of its prompt; each request has a
new id."""


class Cell(NamedTuple):
    """Drafter, shape and budget of one replay."""

    drafter: str
    shape: Any
    budget: int


def suffix(documents: Sequence[Tokens], cell: Cell, learns: bool) -> DraftFunction:
    """ArcticInference's suffix decoding. With `documents`, or if it `learns`, its tree also grows by the answers
    replayed so far, as in serving. Raises ImportError: it is not installed."""
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    depth, factor, probability = LIMITS[cell.drafter]
    options = {"max_spec_tokens": cell.budget - 1, "use_tree_spec": cell.shape == "tree"}
    options |= {"max_spec_factor": factor, "min_token_prob": probability}
    cache = SuffixDecodingCache(max_tree_depth=depth, max_cached_requests=-1 if len(documents) or learns else 0)
    for number, document in enumerate(documents):
        cache.start_request(("store", number), [])
        cache.add_active_response(("store", number), document.tolist())
        cache.stop_request(("store", number))
    out = DraftBatch.empty(1, cell.budget)
    current, known = "", 0

    def draft(request: str, tokens: Tokens, n: int) -> DraftBatch:
        nonlocal current, known
        if request != current:
            if current:
                cache.stop_request(current)
            cache.start_request(request, tokens[:n].tolist())
        elif n > known:
            cache.add_active_response(request, tokens[known:n].tolist())
        current, known = request, n
        found = cache.speculate(request, tokens[max(0, n - depth) : n].tolist(), **options)
        count = 1 + len(found.token_ids)
        out.tokens[0, :count] = [tokens[n - 1], *found.token_ids]
        out.parents[0, :count] = [-1, *(parent + 1 for parent in found.parents)]
        out.counts[0] = count
        return out

    return draft


def lookup(budget: int) -> DraftFunction:
    """Prompt lookup: the continuation of the first occurrence of the longest suffix of 4, 3 or 2 tokens."""
    out = DraftBatch.empty(1, budget)
    out.parents[0] = np.arange(-1, budget - 1)

    def draft(request: str, tokens: Tokens, n: int) -> DraftBatch:
        found = tokens[:0]
        for size in (size for size in (4, 3, 2) if size < n):
            windows = np.lib.stride_tricks.sliding_window_view(tokens[: n - 1], size)
            hits = np.flatnonzero((windows == tokens[n - size : n]).all(1))
            if len(hits):
                start = int(hits[0]) + size
                found = tokens[start : min(start + budget - 1, n)]
                break
        out.tokens[0, : 1 + len(found)] = [tokens[n - 1], *found]
        out.counts[0] = 1 + len(found)
        return out

    return draft
