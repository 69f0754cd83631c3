"""Training the learned scorer: online logistic regression over the nodes that a replayed trace passes through."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numba import njit
from numpy.typing import NDArray

from sssd_plugin.datastore.index.sub_index import SEPARATOR, Snapshot, SubIndex
from sssd_plugin.learned import FEATURES, SETS, SHORTLIST, draft_tree, initial_weights, scratch
from sssd_plugin.request_index import RequestIndex, _ingest

EPSILON = 1e-3


@njit(nogil=True, cache=True)
def _replay(
    slots, s, truth, start, table, store_size, max_nodes, every_token, rate,
    shared, gated, shared_sum, gated_sum, weights,
    tokens, parents, depths, scores, kinds, ints, floats, counts, features, sets, found, names, probabilities,
):  # fmt: skip
    """Replay one request from `start` on as far as its slot has room; learn at every expanded node on the true path.

    AdaGrad on the log-loss of the true token, for the shared weights and those of the node's set alike. Returns the
    position reached: the caller grows the slot and calls again.
    """
    position = start
    while position < len(truth):
        if not _ingest(slots, s, truth, 0, position):
            return position
        n = draft_tree(
            slots, s, table, store_size, weights, max_nodes, False, 0.0, tokens, parents, depths, scores,
            kinds, ints, floats, counts, features, sets, found, names, probabilities,
        )  # fmt: skip
        current, accepted = 0, 0
        while position + accepted < len(truth):
            true = truth[position + accepted]
            if sets[current] >= 0 and rate > 0:
                g = sets[current]
                for f in range(FEATURES):
                    gradient = 0.0
                    for i in range(found[current]):
                        hit = 1.0 if names[current, i] == true else 0.0
                        gradient += features[current, i, f] * (probabilities[current, i] - hit)
                    shared_sum[f] += gradient * gradient
                    gated_sum[g, f] += gradient * gradient
                    shared[f] -= rate * gradient / np.sqrt(shared_sum[f] + EPSILON)
                    gated[g, f] -= rate * gradient / np.sqrt(gated_sum[g, f] + EPSILON)
                for h in range(SETS):
                    for f in range(FEATURES):
                        weights[h, f] = shared[f] + gated[h, f]
            following = -1
            for i in range(1, n):
                if parents[i] == current and tokens[i] == true:
                    following = i
                    break
            if following < 0:
                break
            current = following
            accepted += 1
        sets[:] = -1
        position += 1 if every_token else accepted + 1
    return position


class Trainer:
    """Weights in training.

    Attributes:
        weights: float64 [SETS, FEATURES], shared plus gated, what the scorer uses.
    """

    def __init__(self) -> None:
        self._shared = initial_weights()[0].copy()
        self._gated = np.zeros((SETS, FEATURES))
        self._shared_sum, self._gated_sum = np.zeros(FEATURES), np.zeros((SETS, FEATURES))
        self.weights = initial_weights()

    def replay(self, snapshot: Snapshot, prompt: NDArray[np.int32], output: NDArray[np.int32], *, max_nodes: int,
               rate: float) -> None:  # fmt: skip
        """Learn from one answer; with `max_nodes` 1 at the root of every position, else along accepted tree paths."""
        nodes = max(max_nodes, 1) + 1
        ints, floats, counts = scratch(nodes, len(snapshot.sub_indices))
        truth = np.concatenate([prompt, output]).astype(np.int32)
        index = RequestIndex(1)
        slots = index.slot_ids(["r"])
        position = len(prompt)
        while position < len(truth):
            index.append(slots, truth[index.length("r") : position], np.array([0, position - index.length("r")]))
            position = _replay(
                index.slots, slots[0], truth, position, snapshot.table, snapshot.n_tokens, max_nodes, max_nodes == 1,
                rate, self._shared, self._gated, self._shared_sum, self._gated_sum, self.weights,
                np.zeros(nodes, np.int32), np.zeros(nodes, np.int32), np.zeros(nodes, np.int32),
                np.zeros(nodes, np.float32), np.zeros(nodes, np.uint8), ints, floats, counts,
                np.zeros((nodes, SHORTLIST, FEATURES)),
                np.full(nodes, -1, np.int32), np.zeros(nodes, np.int32), np.zeros((nodes, SHORTLIST), np.int32),
                np.zeros((nodes, SHORTLIST)),
            )  # fmt: skip


def train(
    rows: Sequence[tuple[NDArray[np.int32], NDArray[np.int32]]],
    vocab_size: int,
    *,
    folds: int = 4,
    progress: Callable[[], None] = lambda: None,
) -> NDArray[np.float64]:
    """Train on (prompt, output) rows; each fold is replayed against a store of the outputs of all the others.

    Returns:
        float64 [SETS, FEATURES].

    Raises:
        ValueError: too few rows to split.
    """
    if len(rows) < 2 * folds:
        raise ValueError(f"training needs at least {2 * folds} rows with a prompt and an output, not {len(rows)}")
    snapshots = []
    for fold in range(folds):
        documents = [np.append(output, SEPARATOR) for i, (_, output) in enumerate(rows) if i % folds != fold]
        snapshots.append(Snapshot.of([SubIndex.build(np.concatenate(documents).astype(np.int32), vocab_size)]))
    trainer = Trainer()
    for max_nodes, rate in SCHEDULE:
        for i, (prompt, output) in enumerate(rows):
            trainer.replay(snapshots[i % folds], prompt, output, max_nodes=max_nodes, rate=rate)
            progress()
    return trainer.weights


SCHEDULE = ((1, 0.05), (1, 0.025), (16, 0.03), (16, 0.015))
"""(nodes, learning rate) of each pass: roots of every position first, then the trees that will be drafted."""
