"""The learned scorer: a gated log-linear model over the counts at a node; its scores are calibrated probabilities.

Where the paper samples whole continuations once, at the root, and merges the sources with fixed discounts
(papers/sssd.txt, Algorithm 3), this asks every source again at every node and learns how far to trust each.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import numpy as np
from numba import njit
from numpy.typing import NDArray

from sssd_plugin.candidates import (
    COLUMNS,
    HASH_BITS,
    INPUT,
    MAX_CANDIDATES,
    MAX_SAMPLES,
    ORDERS,
    ROW,
    SKIP_INPUT,
    SKIP_STORE,
    STORE,
    STORE_ORDERS,
    advance,
    gather,
)
from sssd_plugin.pointers import int32_at, uint16_at
from sssd_plugin.request_index import COUNTS, HEADS, LENGTH, PREVIOUS, TABLE_SIZE, TOKENS, find

FEATURES = 17
SETS = 30  # weight sets: 5 bins of the longest matching store context x 6 of the longest request context
SHORTLIST = 10
ROOT_SAMPLES = MAX_SAMPLES
DEEP_SAMPLES = 8
MAX_DEPTH = 24
STORE_DISCOUNT = 0.7
INPUT_DISCOUNT = 0.4
EXPAND_MARGIN = 0.7  # the best child a node can hope for, as a share of its own probability

_LOG_COUNT = np.log(np.arange(512) + 0.1)
_LOG_TOTAL = np.log(np.arange(512) + 1.0)


@njit(nogil=True, cache=True)
def score(
    table, names, counts, totals, kinds, n,
    tokens, heads, request_counts, table_size, length, store_size,
    weights, features, probabilities, shortlist, cheap, store_p, input_p, share, scale, back_off,
):  # fmt: skip
    """Score the most promising candidates of one node.

    Args:
        table: `Snapshot.table`; names, counts, totals, kinds, n: from `gather`.
        tokens, heads, request_counts, table_size, length: the request, as in `RequestIndex`.
        store_size: tokens in the whole store.
        weights: float64 [SETS, FEATURES].
        features: float64 [SHORTLIST, FEATURES], out.
        probabilities: float64 [SHORTLIST], out: P(next token = candidate); they and P(none of these) sum to 1.
        shortlist: int32 [SHORTLIST], out: the candidates' rows, most promising first.
        cheap, store_p, input_p, share: float64 [MAX_CANDIDATES], scratch.
        scale, back_off: float64 [COLUMNS], scratch.

    Returns:
        (length of the shortlist, weight set used).
    """
    store_order = 0
    for k in range(STORE_ORDERS):
        if totals[STORE + k] > 0:
            store_order = k + 1
    input_order = 0
    for k in range(ORDERS):
        if totals[INPUT + k] > 0:
            input_order = k + 1
    input_bin = input_order if input_order < 4 else (4 if input_order < 6 else 5)
    weight_set = store_order * 6 + input_bin

    # Interpolation as p <- max(count - discount, 0) / total + (discount * kinds / total) * p, shortest context first.
    for k in range(store_order):
        scale[STORE + k] = 1.0 / totals[STORE + k]
        back_off[STORE + k] = STORE_DISCOUNT * kinds[STORE + k] * scale[STORE + k]
    for k in range(input_order):
        scale[INPUT + k] = 1.0 / totals[INPUT + k]
        back_off[INPUT + k] = INPUT_DISCOUNT * kinds[INPUT + k] * scale[INPUT + k]
    skip_store = 0.1 / max(totals[SKIP_STORE + 1], 1)
    skip_input = 0.1 / max(totals[SKIP_INPUT + 1], 1)
    per_token = 1.0 / max(store_size, 1)
    for c in range(n):
        share[c] = 0.0
    for j in range(len(table)):
        size = table[j, 5]
        starts = int32_at(table[j, 2], size + 1)
        for c in range(n):
            token = names[c]
            if token < size:
                share[c] += starts[token + 1] - starts[token]
    m = 0
    for c in range(n):
        share[c] *= per_token
        p = share[c] + 1e-7
        for k in range(store_order):
            p = max(counts[c, STORE + k] - STORE_DISCOUNT, 0.0) * scale[STORE + k] + back_off[STORE + k] * p
        store_p[c] = p
        p = 1e-4
        for k in range(input_order):
            p = max(counts[c, INPUT + k] - INPUT_DISCOUNT, 0.0) * scale[INPUT + k] + back_off[INPUT + k] * p
        input_p[c] = p
        v = 0.6 * p + 0.4 * store_p[c] + skip_store * counts[c, SKIP_STORE + 1] + skip_input * counts[c, SKIP_INPUT + 1]
        cheap[c] = v
        if m < SHORTLIST:
            i = m
            m += 1
        elif v > cheap[shortlist[m - 1]]:
            i = m - 1
        else:
            continue
        while i > 0 and cheap[shortlist[i - 1]] < v:
            shortlist[i] = shortlist[i - 1]
            i -= 1
        shortlist[i] = c

    top = 0.0
    for i in range(m):
        c = shortlist[i]
        token = names[c]
        at = find(heads, table_size, tokens, token)
        in_request = np.int64(request_counts[at])
        x = features[i]
        x[0] = 1.0
        x[1] = math.log(max(store_p[c], 1e-7))
        x[2] = math.log(max(input_p[c], 1e-6))
        x[3] = _LOG_COUNT[in_request] if in_request < 512 else math.log(in_request + 0.1)
        x[3] -= math.log(length * share[c] + 0.5)
        x[4] = 1.0 if in_request > 0 else 0.0
        for k in range(3):
            total = totals[STORE + 1 + k]
            x[5 + k] = _LOG_COUNT[counts[c, STORE + 1 + k]] - _LOG_TOTAL[total] if total > 0 else 0.0
        for k in range(4):
            total = totals[INPUT + k]
            x[8 + k] = _LOG_COUNT[counts[c, INPUT + k]] - _LOG_TOTAL[total] if total > 0 else 0.0
        for k in range(5):
            total = totals[SKIP_STORE + k]
            x[12 + k] = _LOG_COUNT[counts[c, SKIP_STORE + k]] - _LOG_TOTAL[total] if total > 0 else 0.0
        z = 0.0
        for f in range(FEATURES):
            z += x[f] * weights[weight_set, f]
        probabilities[i] = z
        top = max(top, z)
    total_e = math.exp(-top)
    for i in range(m):
        probabilities[i] = math.exp(probabilities[i] - top)
        total_e += probabilities[i]
    for i in range(m):
        probabilities[i] /= total_e
    return m, weight_set


@njit(nogil=True, cache=True)
def _ints_per_node(sub_indices):
    """Scratch of one node: ranges in every sub-index, the samples taken of them, its place in the frontier."""
    return 2 * sub_indices * STORE_ORDERS + STORE_ORDERS * (1 + MAX_SAMPLES) + 3


@njit(nogil=True, cache=True)
def draft_tree(
    slots, s, table, store_size, weights, max_nodes, chain, min_score,
    out_tokens, out_parents, out_depths, out_scores, out_kinds,
    ints, floats, counts, node_features, node_sets, node_found, node_names, node_probabilities,
):  # fmt: skip
    """Best-first tree of at most `max_nodes` nodes for request slot s, by product of the scores along each path.

    Args:
        slots: `RequestIndex.slots`; table: `Snapshot.table`; store_size: tokens in it.
        chain: only ever extend the newest node, by its best candidate.
        min_score: leave out nodes below this probability of being accepted.
        out_*: one row of a `DraftBatch`; a node's kind is the weight set that scored it, so the matching contexts.
        ints, floats, counts: from `scratch`.
        node_*: float64 [N, SHORTLIST, FEATURES], int32 [N], int32 [N], int32 [N, SHORTLIST], float64 [N, SHORTLIST]:
            what was seen at each expanded node, for learning; N = 0 records nothing.

    Returns:
        Number of nodes.
    """
    length = slots[s, LENGTH]
    if length == 0:
        return 0
    tokens = int32_at(slots[s, TOKENS], length)
    previous = int32_at(slots[s, PREVIOUS], length)
    table_size = slots[s, TABLE_SIZE]
    heads = int32_at(slots[s, HEADS], table_size)
    request_counts = uint16_at(slots[s, COUNTS], table_size)

    j_n = len(table)
    room_for = (len(ints) - _FIXED_INTS) // _ints_per_node(j_n)
    at = 0  # first what must not move when the number of sub-indices changes: the stamps and their clock
    keys = ints[at : at + (1 << HASH_BITS)]
    at += 1 << HASH_BITS
    stamps = ints[at : at + (1 << HASH_BITS)]
    at += 1 << HASH_BITS
    entries = ints[at : at + (1 << HASH_BITS)]
    at += 1 << HASH_BITS
    names = ints[at : at + MAX_CANDIDATES]
    at += MAX_CANDIDATES
    shortlist = ints[at : at + SHORTLIST]
    at += SHORTLIST
    totals = ints[at : at + COLUMNS]
    at += COLUMNS
    kinds = ints[at : at + COLUMNS]
    at += COLUMNS
    context = ints[at : at + ORDERS]
    at += ORDERS
    skipped = ints[at : at + 3 * (1 + MAX_SAMPLES)].reshape((3, 1 + MAX_SAMPLES))
    at += 3 * (1 + MAX_SAMPLES)
    clock = ints[at : at + 1]
    at += 1
    ranges = room_for * j_n * STORE_ORDERS
    lo = ints[at : at + ranges].reshape((room_for, j_n, STORE_ORDERS))
    at += ranges
    hi = ints[at : at + ranges].reshape((room_for, j_n, STORE_ORDERS))
    at += ranges
    sampled = ints[at : at + room_for * STORE_ORDERS * (1 + MAX_SAMPLES)].reshape(
        (room_for, STORE_ORDERS, 1 + MAX_SAMPLES)
    )
    at += room_for * STORE_ORDERS * (1 + MAX_SAMPLES)
    frontier_parent = ints[at : at + room_for]
    at += room_for
    frontier_token = ints[at : at + room_for]
    at += room_for
    frontier_kind = ints[at : at + room_for]
    at += room_for
    cheap = floats[:MAX_CANDIDATES]
    store_p = floats[MAX_CANDIDATES : 2 * MAX_CANDIDATES]
    input_p = floats[2 * MAX_CANDIDATES : 3 * MAX_CANDIDATES]
    share = floats[3 * MAX_CANDIDATES : 4 * MAX_CANDIDATES]
    at = 4 * MAX_CANDIDATES
    scale = floats[at : at + COLUMNS]
    at += COLUMNS
    back_off = floats[at : at + COLUMNS]
    at += COLUMNS
    probabilities = floats[at : at + SHORTLIST]
    at += SHORTLIST
    features = floats[at : at + SHORTLIST * FEATURES].reshape((SHORTLIST, FEATURES))
    at += SHORTLIST * FEATURES
    frontier_score = floats[at : at + room_for]
    at += room_for
    path_score = floats[at : at + room_for]

    # Ranges of the last tokens, one at a time; the last but one state is the root's context without its last token.
    before, here = room_for - 1, -1
    first = max(0, length - STORE_ORDERS)
    sampled[0, :, 0] = 0
    sampled[before, :, 0] = 0
    for i in range(first, length):
        target = 0 if (length - 1 - i) % 2 == 0 else before
        advance(table, lo, hi, sampled, here, target, tokens[i])
        here = target
    root_parent = before if length - first > 1 else -1

    out_tokens[0] = tokens[length - 1]
    out_parents[0] = -1
    out_depths[0] = 0
    out_scores[0] = 1.0
    out_kinds[0] = 0
    path_score[0] = 1.0
    n, pending, current = 1, 0, 0
    record = len(node_sets) > 0
    if max_nodes <= 1 and not record:
        return 1
    while True:
        room = max_nodes - n
        hope = path_score[current] * EXPAND_MARGIN
        hopeless = current > 0 and not chain and pending >= room and hope <= frontier_score[room - 1]
        if out_depths[current] < MAX_DEPTH and not hopeless:
            parent = root_parent
            if current > 0:
                parent = out_parents[current]
                advance(table, lo, hi, sampled, parent, current, out_tokens[current])
            filled, up = 0, current
            while up > 0 and filled < ORDERS:
                context[filled] = out_tokens[up]
                filled += 1
                up = out_parents[up]
            i = length - 1
            while i >= 0 and filled < ORDERS:
                context[filled] = tokens[i]
                filled += 1
                i -= 1
            clock[0] += 1
            found = gather(
                table, lo, hi, sampled, current, parent, ROOT_SAMPLES if current == 0 else DEEP_SAMPLES,
                tokens, previous, heads, table_size, length, context, filled,
                clock[0], keys, stamps, entries, names, counts, totals, kinds, skipped,
            )  # fmt: skip
            m, weight_set = score(
                table, names, counts, totals, kinds, found,
                tokens, heads, request_counts, table_size, length, store_size,
                weights, features, probabilities, shortlist, cheap, store_p, input_p, share, scale, back_off,
            )  # fmt: skip
            if record:
                node_sets[current] = weight_set
                node_found[current] = m
                for i in range(m):
                    node_features[current, i] = features[i]
                    node_names[current, i] = names[shortlist[i]]
                    node_probabilities[current, i] = probabilities[i]
            if chain:
                pending = 0
                best = -1
                for i in range(m):
                    if best < 0 or probabilities[i] > probabilities[best]:
                        best = i
                if best >= 0:
                    frontier_score[0] = path_score[current] * probabilities[best]
                    frontier_parent[0] = current
                    frontier_token[0] = names[shortlist[best]]
                    frontier_kind[0] = weight_set
                    pending = 1
            else:
                pending = min(pending, room)
                for i in range(m):
                    v = path_score[current] * probabilities[i]
                    if pending < room:
                        k = pending
                        pending += 1
                    elif room > 0 and v > frontier_score[pending - 1]:
                        k = pending - 1
                    else:
                        continue
                    while k > 0 and frontier_score[k - 1] < v:
                        frontier_score[k] = frontier_score[k - 1]
                        frontier_parent[k] = frontier_parent[k - 1]
                        frontier_token[k] = frontier_token[k - 1]
                        frontier_kind[k] = frontier_kind[k - 1]
                        k -= 1
                    frontier_score[k] = v
                    frontier_parent[k] = current
                    frontier_token[k] = names[shortlist[i]]
                    frontier_kind[k] = weight_set
        elif chain:
            pending = 0
        if n >= max_nodes or pending == 0 or frontier_score[0] <= min_score:
            return n
        current = n
        n += 1
        path_score[current] = frontier_score[0]
        out_tokens[current] = frontier_token[0]
        out_parents[current] = frontier_parent[0]
        out_depths[current] = out_depths[frontier_parent[0]] + 1
        out_scores[current] = frontier_score[0]
        out_kinds[current] = frontier_kind[0]
        pending -= 1
        for i in range(pending):
            frontier_score[i] = frontier_score[i + 1]
            frontier_parent[i] = frontier_parent[i + 1]
            frontier_token[i] = frontier_token[i + 1]
            frontier_kind[i] = frontier_kind[i + 1]
        if n >= max_nodes:
            return n


_FIXED_INTS = 3 * (1 << HASH_BITS) + MAX_CANDIDATES + SHORTLIST + 2 * COLUMNS + ORDERS + 3 * (1 + MAX_SAMPLES) + 1


def scratch(max_nodes: int, sub_indices: int) -> tuple[NDArray[np.int32], NDArray[np.float64], NDArray[np.uint8]]:
    """Scratch space of `draft_tree` for up to `max_nodes` nodes over up to `sub_indices` sub-indices."""
    nodes = max_nodes + 1
    ints = np.zeros(_FIXED_INTS + nodes * _ints_per_node(sub_indices), np.int32)
    nodes = (len(ints) - _FIXED_INTS) // _ints_per_node(0)  # over fewer, `draft_tree` finds room for more
    floats = np.zeros(4 * MAX_CANDIDATES + 2 * COLUMNS + SHORTLIST * (1 + FEATURES) + 2 * nodes, np.float64)
    return ints, floats, np.zeros((MAX_CANDIDATES, ROW), np.uint8)


@dataclass(frozen=True)
class Weights:
    """Weights of the learned scorer.

    Attributes:
        values: float64 [SETS, FEATURES].
        trained_on: what they were trained on, for people to read.
        trace_sha256: checksum of the trace, so that an evaluation can tell its own training data.
    """

    values: NDArray[np.float64]
    trained_on: str = ""
    trace_sha256: str = ""

    def __post_init__(self) -> None:
        if self.values.shape != (SETS, FEATURES) or not np.isfinite(self.values).all():
            raise ValueError(f"scorer weights must be {SETS} x {FEATURES} finite numbers, not {self.values.shape}")

    @classmethod
    def load(cls, path: Path | None = None) -> Weights:
        """Read a weights file; without a path, the ones that ship with the package.

        Raises:
            ValueError: not a weights file of this version.
        """
        source = files("sssd_plugin") / "weights" / "default.json" if path is None else Path(path)
        try:
            data = json.loads(source.read_text())
            if data["format"] != "freedraft-scorer-1":
                raise ValueError(f"format {data['format']!r}")
            values = np.array(data["weights"], np.float64)
            return cls(values, str(data["trained_on"]), str(data["trace_sha256"]))
        except FileNotFoundError:
            raise ValueError(f"weights: {source} does not exist; train one with 'freedraft calibrate scorer'") from None
        except (KeyError, TypeError, ValueError, OSError) as error:
            raise ValueError(
                f"weights: {source} is no scorer weights file of this version ({error}); "
                "train one with 'freedraft calibrate scorer'"
            ) from None

    def save(self, path: Path) -> None:
        rows = [[float(f"{v:.6g}") for v in row] for row in self.values]
        body = ",\n  ".join(json.dumps(row) for row in rows)
        head = {"format": "freedraft-scorer-1", "trained_on": self.trained_on, "trace_sha256": self.trace_sha256}
        text = json.dumps(head)[:-1] + ',\n "weights": [\n  ' + body + "\n ]}\n"
        path.write_text(text)


def initial_weights() -> NDArray[np.float64]:
    """Where training starts: a mix of both interpolated probabilities."""
    weights = np.zeros((SETS, FEATURES))
    weights[:, :3] = (1.0, 0.4, 0.5)
    return weights
