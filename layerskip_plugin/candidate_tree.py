"""SWIFT's dynamic verification: a greedy chain with the draft model's other candidates as siblings."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from freedraft.draft import DraftBatch
from layerskip_plugin.rounds import Round

# Candidates by the confidence in the first of them: 10 in (0, .5], 5 in (.5, .8], 3 in (.8, .95], 1 above (SWIFT, 3.3).
CONFIDENCES = (0.5, 0.8, 0.95)
CANDIDATES = (10, 5, 3, 1)
MAX_CANDIDATES = CANDIDATES[0]


def candidates_at(confidence: NDArray[np.float32]) -> NDArray[np.int64]:
    """Candidates to verify by the probability of the best one; any shape."""
    return np.asarray(CANDIDATES, np.int64)[np.searchsorted(CONFIDENCES, confidence, side="left")]


def candidate_tree(round_: Round, roots: NDArray[np.int32], max_nodes: int, siblings: bool = True) -> DraftBatch:
    """Trees in which only the nodes of the chain have children.

    Node 0 is the root and node j + 1 the chain's token j. Siblings follow, best first: at each position the next k - 1
    candidates, while nodes are left. A sibling's score is the probability that the chain is accepted up to its
    position, times its own.

    Args:
        roots: int32 [B], last accepted token of each request.
        max_nodes: limit of nodes per request, root included; longer chains are truncated.
        siblings: whether to add siblings to the chain.
    """
    tokens, probabilities = round_.tokens, round_.probabilities
    batch, depth, width = tokens.shape
    length = np.minimum(round_.drafted, max_nodes - 1).astype(np.int64)
    in_chain = np.arange(depth) < length[:, None]  # [B, D]
    best = np.where(in_chain, probabilities[:, :, 0], 1.0).astype(np.float64)
    chain = np.cumprod(best, 1)
    before = np.concatenate((np.ones((batch, 1)), chain[:, :-1]), 1)  # the chain is accepted up to position j
    scores = before[:, :, None] * probabilities[:, :, 1:]
    allowed = in_chain[:, :, None] & (np.arange(1, width) < candidates_at(probabilities[:, :, 0])[:, :, None])
    allowed &= probabilities[:, :, 1:] > 0
    scores = np.where(allowed & siblings, scores, -1.0).reshape(batch, -1)
    order = np.argsort(-scores, 1, kind="stable")[:, : max_nodes - 1]
    scores = np.take_along_axis(scores, order, 1)
    beside = np.minimum((scores >= 0).sum(1), max_nodes - 1 - length)

    trees = DraftBatch.empty(batch, int((1 + length + beside).max(initial=1)))
    trees.counts[:] = 1 + length + beside
    trees.tokens[:, 0], trees.parents[:, 0], trees.scores[:, 0] = roots, -1, 1.0
    row, position = np.nonzero(in_chain)
    _put(trees, row, position + 1, position, tokens[row, position, 0], chain[row, position])
    row, rank = np.nonzero(np.arange(order.shape[1]) < beside[:, None])
    position, candidate = np.divmod(order[row, rank], max(1, width - 1))
    _put(trees, row, 1 + length[row] + rank, position, tokens[row, position, candidate + 1], scores[row, rank])
    return trees


def _put(trees: DraftBatch, row: Any, node: Any, parent: Any, tokens: Any, scores: Any) -> None:
    """Put nodes under the chain's nodes `parent`; a chain node's index is its depth."""
    trees.tokens[row, node], trees.parents[row, node], trees.depths[row, node] = tokens, parent, parent + 1
    trees.scores[row, node] = scores


def cut_to_width(
    trees: DraftBatch, chains: NDArray[np.int32], widths: NDArray[np.int32], prices: NDArray[np.float64]
) -> None:
    """Keep the nodes of `candidate_tree` with the best gain minus verification cost, if all requests have the width of
    the largest: siblings are free up to the width of the longest chain.

    Args:
        chains: int32 [B], tokens of each chain.
        widths: int32 [W], possible numbers of nodes, ascending; prices: float64 [W], step times in tokens.
    """
    first = np.searchsorted(widths, 1 + int(chains.max(initial=0)))
    widths, prices = widths[first:], prices[first:]
    if not len(widths):
        return
    node = np.arange(trees.max_nodes)
    sibling = (node > chains[:, None]) & (node < trees.counts[:, None])
    brings = np.concatenate([[0.0], np.where(sibling, trees.scores, 0.0).sum(0).cumsum()])
    gain = brings[np.minimum(widths, trees.max_nodes)]
    np.minimum(trees.counts, int(widths[(gain - prices).argmax()]), out=trees.counts)
