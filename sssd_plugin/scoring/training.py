"""Training the learned scorer: online logistic regression over the nodes that a replayed trace passes through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from freedraft.draft import DraftBatch
from sssd_plugin.datastore.index.sub_index import SEPARATOR, Snapshot, SubIndex
from sssd_plugin.request_index import RequestIndex, ingest, request_at
from sssd_plugin.scoring.candidates import SHORTLIST, scratch
from sssd_plugin.scoring.learned import Recorded, draft_tree
from sssd_plugin.scoring.long_contexts import long_rows
from sssd_plugin.scoring.views import Store, Tree
from sssd_plugin.scoring.weights import CONTEXT_SETS, FEATURES, SETS, initial_weights

EPSILON = 1e-3
SCHEDULE = ((1, 0.05), (1, 0.05), (16, 0.05), (16, 0.03), (16, 0.015))
"""(nodes, learning rate) of each pass: roots of every position first, then the trees that will be drafted."""
LONG_ROWS = 2
"""One answer over a long prompt is made for each so many recorded ones."""


class Model(NamedTuple):
    """Weights in training, and AdaGrad's sums of their squared gradients.

    Attributes:
        weights: float64 [SETS, FEATURES], what the scorer uses: gated, and shared too in the sets by context.
        shared, shared_sum: float64 [FEATURES]; gated, gated_sum: float64 [SETS, FEATURES].
    """

    weights: NDArray[np.float64]
    shared: NDArray[np.float64]
    gated: NDArray[np.float64]
    shared_sum: NDArray[np.float64]
    gated_sum: NDArray[np.float64]


@njit(nogil=True, cache=True)
def _learn(model, seen, node, token, rate):
    """Take one step of AdaGrad on the log-loss of `token`, for the shared weights and those of the node's sets."""
    first, second = seen.weight_sets[node]
    for f in range(FEATURES):
        gradient = 0.0
        for i in range(seen.sizes[node]):
            hit = 1.0 if seen.tokens[node, i] == token else 0.0
            gradient += seen.features[node, i, f] * (seen.probabilities[node, i] - hit)
        model.shared_sum[f] += gradient * gradient
        model.shared[f] -= rate * gradient / np.sqrt(model.shared_sum[f] + EPSILON)
        for g in (first, second):
            model.gated_sum[g, f] += gradient * gradient
            model.gated[g, f] -= rate * gradient / np.sqrt(model.gated_sum[g, f] + EPSILON)
        model.weights[second, f] = model.gated[second, f]
        for g in range(CONTEXT_SETS):
            model.weights[g, f] = model.shared[f] + model.gated[g, f]


@njit(nogil=True, cache=True)
def _replay(slots, s, truth, position, store, max_nodes, rate, model, tree, scratch, seen):
    """Replay one request and learn at every expanded node on the true path; return where its slot has to grow."""
    while position < len(truth) and ingest(slots, s, truth, 0, position):
        request = request_at(slots, s)
        n = draft_tree(request, store, model.weights, max_nodes, False, 0.0, tree, scratch, seen)
        current, accepted = 0, 0
        while position + accepted < len(truth):
            token = truth[position + accepted]
            if seen.weight_sets[current, 0] >= 0 and rate > 0:
                _learn(model, seen, current, token, rate)
            following = -1
            for i in range(1, n):
                if tree.parents[i] == current and tree.tokens[i] == token:
                    following = i
                    break
            if following < 0:
                break
            current = following
            accepted += 1
        seen.weight_sets[:] = -1
        position += 1 if max_nodes == 1 else accepted + 1
    return position


def replay(
    model: Model, snapshot: Snapshot, prompt: NDArray[np.int32], output: NDArray[np.int32], max_nodes: int, rate: float
) -> None:
    """Learn from one answer; with `max_nodes` 1 at the root of every position, else along accepted tree paths."""
    n = max_nodes + 1
    out = DraftBatch.empty(1, n)
    tree = Tree(out.tokens[0], out.parents[0], out.depths[0], out.scores[0], out.kinds[0])
    seen = Recorded(
        np.full((n, 2), -1, np.int32),
        np.zeros(n, np.int32),
        np.zeros((n, SHORTLIST), np.int32),
        np.zeros((n, SHORTLIST)),
        np.zeros((n, SHORTLIST, FEATURES)),
    )
    store = Store(snapshot.table, snapshot.n_tokens)
    space = scratch(n, len(snapshot.sub_indices))
    truth = np.concatenate([prompt, output]).astype(np.int32)
    index = RequestIndex(1)
    position = len(prompt)
    while position < len(truth):
        index.replace("r", truth[:position])
        slot = index.slot_ids(["r"])[0]
        position = _replay(index.slots, slot, truth, position, store, max_nodes, rate, model, tree, space, seen)


def lessons(
    rows: Sequence[tuple[NDArray[np.int32], NDArray[np.int32]]], vocab_size: int, folds: int = 4
) -> list[tuple[Snapshot, NDArray[np.int32], NDArray[np.int32]]]:
    """Return (store, prompt, output) of each row, and of answers over long prompts made from rows of the same fold.

    Each fold is replayed against a store of the outputs of all the others.

    Raises:
        ValueError: there are too few rows to split.
    """
    if len(rows) < 2 * folds:
        raise ValueError(f"training needs at least {2 * folds} rows with a prompt and an output, not {len(rows)}")
    taught = []
    for fold in range(folds):
        documents = [np.append(output, SEPARATOR) for i, (_, output) in enumerate(rows) if i % folds != fold]
        snapshot = Snapshot.of([SubIndex.build(np.concatenate(documents).astype(np.int32), vocab_size)])
        own = rows[fold::folds]
        for many in (own, long_rows(own, len(own) // LONG_ROWS + 1, seed=fold)):
            # Rows of all folds, recorded and made, take turns.
            taught += [((i + 0.5) / len(many), fold, snapshot, *row) for i, row in enumerate(many)]
    taught.sort(key=lambda lesson: lesson[:2])
    return [lesson[2:] for lesson in taught]


def train(
    rows: Sequence[tuple[NDArray[np.int32], NDArray[np.int32]]],
    vocab_size: int,
    *,
    progress: Callable[[float], None] = lambda done: None,
) -> NDArray[np.float64]:
    """Train on (prompt, output) rows, and on `lessons` made from them.

    Args:
        progress: called with the share that is done.

    Returns:
        float64 [SETS, FEATURES].

    Raises:
        ValueError: there are too few rows to split.
    """
    taught = lessons(rows, vocab_size)
    weights, gated = initial_weights(), np.zeros((SETS, FEATURES))
    model = Model(weights, weights[0].copy(), gated, np.zeros(FEATURES), np.zeros_like(gated))
    for turn, (max_nodes, rate) in enumerate(SCHEDULE):
        for i, (snapshot, prompt, output) in enumerate(taught):
            replay(model, snapshot, prompt, output, max_nodes, rate)
            progress((turn + (i + 1) / len(taught)) / len(SCHEDULE))
    return model.weights
