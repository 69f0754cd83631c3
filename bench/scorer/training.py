"""Training the learned scorer: online logistic regression over the nodes that a replayed trace passes through.

Recycled logits have weights of their own, on top of those of the n-grams, because few traces have logits: they are
learnt from `Recording`s while the others stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray
from rich.progress import Progress

from bench.lib.trace import Row, store_of
from bench.scorer.long_contexts import long_rows
from bench.scorer.record import Recording
from freedraft.draft import DraftBatch
from sssd_plugin.datastore.index.sub_index import Snapshot
from sssd_plugin.recycled_logits import TOP, Recycled, entries, put
from sssd_plugin.request_index import RequestIndex, ingest, request_at
from sssd_plugin.scoring.candidates import SHORTLIST, scratch
from sssd_plugin.scoring.learned import Recorded, draft_tree
from sssd_plugin.scoring.views import Store, Tree, write_context
from sssd_plugin.scoring.weights import CONTEXT_SETS, FEATURES, RECYCLED_FEATURES, SETS, initial_recycled_weights

EPSILON = 1e-3
NO_LOGITS = np.zeros((0, TOP), np.int32), np.zeros((0, TOP), np.float32)
NO_LIMIT = 1 << 31
WITHOUT_LOGITS = Recycled(entries(0), np.int64(0))
SCHEDULE = ((1, 0.05), (1, 0.05), (16, 0.05), (16, 0.03), (16, 0.015))
"""(nodes, learning rate) of each pass: roots of every position first, then the trees that will be drafted."""
RECYCLED_SCHEDULE = ((1, 0.05), (16, 0.05), (32, 0.02))
STORE_EVERY, RECYCLED_MEGABYTES = 16, 64
LONG_ROWS = 2
"""One answer over a long prompt is made for each so many recorded ones."""


class Model(NamedTuple):
    """Weights in training, and AdaGrad's sums of their squared gradients.

    Attributes:
        weights: float64 [SETS, FEATURES], what the scorer uses: gated, and shared too in the sets by context.
        shared, shared_sum: float64 [FEATURES]; gated, gated_sum: float64 [SETS, FEATURES].
        recycled, recycled_sum: float64 [RECYCLED_SETS, RECYCLED_FEATURES].
    """

    weights: NDArray[np.float64]
    shared: NDArray[np.float64]
    gated: NDArray[np.float64]
    shared_sum: NDArray[np.float64]
    gated_sum: NDArray[np.float64]
    recycled: NDArray[np.float64]
    recycled_sum: NDArray[np.float64]

    @classmethod
    def of(cls, weights: NDArray[np.float64], recycled: NDArray[np.float64]) -> Model:
        """Begin with these weights."""
        gated = np.zeros((SETS, FEATURES))
        sums = np.zeros(FEATURES), np.zeros_like(gated)
        return cls(weights, weights[0].copy(), gated, *sums, recycled, np.zeros_like(recycled))


def initial_weights() -> NDArray[np.float64]:
    """Return the weights that training starts from: a mix of both interpolated probabilities."""
    weights = np.zeros((SETS, FEATURES))
    weights[:CONTEXT_SETS, :3] = (1.0, 0.4, 0.5)
    return weights


@njit(nogil=True)
def _gradient(seen, features, node, token, f):
    """Of the log-loss of `token`, for the weight of one feature."""
    total = 0.0
    for i in range(seen.sizes[node]):
        hit = 1.0 if seen.tokens[node, i] == token else 0.0
        total += features[node, i, f] * (seen.probabilities[node, i] - hit)
    return total


@njit(nogil=True)
def _learn(model, seen, node, token, rate):
    """Take one step of AdaGrad, for the shared weights and those of the node's sets."""
    first, second = seen.weight_sets[node]
    for f in range(FEATURES):
        gradient = _gradient(seen, seen.features, node, token, f)
        model.shared_sum[f] += gradient * gradient
        model.shared[f] -= rate * gradient / np.sqrt(model.shared_sum[f] + EPSILON)
        for g in (first, second):
            model.gated_sum[g, f] += gradient * gradient
            model.gated[g, f] -= rate * gradient / np.sqrt(model.gated_sum[g, f] + EPSILON)
        model.weights[second, f] = model.gated[second, f]
        model.weights[:CONTEXT_SETS, f] = model.shared[f] + model.gated[:CONTEXT_SETS, f]


@njit(nogil=True)
def _learn_recycled(model, seen, node, token, rate):
    """The same for the weights of recycled logits."""
    own = seen.recycled_sets[node]
    for f in range(RECYCLED_FEATURES):
        gradient = _gradient(seen, seen.recycled, node, token, f)
        model.recycled_sum[own, f] += gradient * gradient
        model.recycled[own, f] -= rate * gradient / np.sqrt(model.recycled_sum[own, f] + EPSILON)


@njit(nogil=True)
def _replay(
    slots, s, truth, position, store, max_nodes, rate, model, tree, scratch, seen, recycled, start, top_tokens,
    top_log_probs,
):  # fmt: skip
    """Replay one request and learn at every expanded node on the true path; return where its slot has to grow.

    Args:
        recycled: a `Recycled`; where it has entries its weights are learnt, and the logits before `truth[start + i]`
            are `top_tokens[i]` and `top_log_probs[i]`.
    """
    weights = model.weights, model.recycled
    while position < len(truth) and ingest(slots, s, truth, 0, position):
        request = request_at(slots, s)
        n = draft_tree(request, store, recycled, weights, max_nodes, False, 0.0, tree, scratch, seen)
        current, accepted = 0, 0
        while position + accepted < len(truth):
            token = truth[position + accepted]
            if seen.weight_sets[current, 0] >= 0 and rate > 0:
                if len(recycled.entries) == 0:
                    _learn(model, seen, current, token, rate)
                elif seen.recycled_sets[current] >= 0:
                    _learn_recycled(model, seen, current, token, rate)
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
        gained = 1 if max_nodes == 1 else accepted + 1
        if len(recycled.entries) > 0:
            for at in range(position, min(position + gained, len(truth))):
                filled = write_context(truth[:at], tree.tokens, tree.parents, 0, scratch.context)
                put(
                    recycled, scratch.context, filled, scratch.keys, top_tokens[at - start], top_log_probs[at - start],
                    NO_LIMIT, scratch.clock[0],
                )  # fmt: skip
        position += gained
    return position


def replay(
    model: Model,
    snapshot: Snapshot,
    answer: Recording,
    max_nodes: int,
    rate: float,
    recycled: Recycled = WITHOUT_LOGITS,
) -> None:
    """Learn from one answer; with `max_nodes` 1 at the root of every position, else along accepted tree paths."""
    n = max_nodes + 1
    out = DraftBatch.empty(1, n)
    tree = Tree(out.tokens[0], out.parents[0], out.depths[0], out.scores[0], out.kinds[0])
    seen = Recorded(
        np.full((n, 2), -1, np.int32), np.zeros(n, np.int32), np.zeros((n, SHORTLIST), np.int32),
        np.zeros((n, SHORTLIST)), np.zeros((n, SHORTLIST, FEATURES)), np.full(n, -1, np.int32),
        np.zeros((n, SHORTLIST, RECYCLED_FEATURES)),
    )  # fmt: skip
    store = Store(snapshot.table, snapshot.n_tokens)
    space = scratch(n, len(snapshot.sub_indices))
    truth = np.concatenate([answer.prompt, answer.output]).astype(np.int32)
    index = RequestIndex(1)
    position = len(answer.prompt)
    while position < len(truth):
        index.replace("r", truth[:position])
        slot = index.slot_ids(["r"])[0]
        position = _replay(
            index.slots, slot, truth, position, store, max_nodes, rate, model, tree, space, seen, recycled,
            len(answer.prompt), answer.top_tokens, answer.top_log_probs,
        )  # fmt: skip


def lessons(
    rows: Sequence[Row], vocab_size: int, folds: int = 4
) -> list[tuple[Snapshot, NDArray[np.int32], NDArray[np.int32]]]:
    """Return (store, prompt, output) of each row, and of answers over long prompts made from rows of the same fold.

    Each fold is replayed against a store of the outputs of all the others. Raises ValueError: there are too few rows to
    split."""
    if len(rows) < 2 * folds:
        raise ValueError(f"training needs at least {2 * folds} rows with a prompt and an output, not {len(rows)}")
    taught = []
    for fold in range(folds):
        snapshot = store_of([output for i, (_, output) in enumerate(rows) if i % folds != fold], vocab_size)
        own = rows[fold::folds]
        for many in (own, long_rows(own, len(own) // LONG_ROWS + 1, seed=fold)):
            # Rows of all folds, recorded and made, take turns.
            taught += [((i + 0.5) / len(many), fold, snapshot, *row) for i, row in enumerate(many)]
    taught.sort(key=lambda lesson: lesson[:2])
    return [lesson[2:] for lesson in taught]


def train(rows: Sequence[Row], vocab_size: int, bar: Progress) -> NDArray[np.float64]:
    """Train float64 [SETS, FEATURES] on `lessons` made of (prompt, output) rows."""
    taught = lessons(rows, vocab_size)
    model = Model.of(initial_weights(), initial_recycled_weights())
    task = bar.add_task("training", total=len(SCHEDULE) * len(taught))
    for max_nodes, rate in SCHEDULE:
        for snapshot, prompt, output in taught:
            replay(model, snapshot, Recording(prompt, output, *NO_LOGITS), max_nodes, rate)
            bar.advance(task)
    return model.weights


def train_recycled(
    weights: NDArray[np.float64], recordings: Sequence[Recording], vocab_size: int, bar: Progress
) -> NDArray[np.float64]:
    """Train float64 [RECYCLED_SETS, RECYCLED_FEATURES], over n-gram weights that stay as they are: the answers are
    replayed in their order, with the logits, and a store, of those before."""
    model = Model.of(weights, initial_recycled_weights())
    task = bar.add_task("with logits", total=len(RECYCLED_SCHEDULE) * len(recordings))
    for max_nodes, rate in RECYCLED_SCHEDULE:
        recycled, snapshot = Recycled(entries(RECYCLED_MEGABYTES), np.int64(0)), Snapshot.empty()
        for i, recording in enumerate(recordings):
            if i % STORE_EVERY == 0 and i > 0:
                snapshot = store_of([r.output for r in recordings[:i]], vocab_size)
            replay(model, snapshot, recording, max_nodes, rate, recycled)
            bar.advance(task)
    return model.recycled
