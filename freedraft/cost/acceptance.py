"""`Acceptance`: what a draft node's score is worth, learnt from what verification shows.

The probability that a node is accepted given that its parent was is modelled as

    sigmoid(logit(score / parent's score) + a[bin of that] + b[kind] + c[depth] + d)

with all of them 0 at first, and each outcome moves the four that it concerns along the gradient of its log-likelihood:
a, b and c by a fixed step, so that a change is followed within a few hundred outcomes; d by one that grows with the
mean error of the newest steps, so that text of which nothing is accepted any more is noticed within some ten steps.
d is of n-grams alone, 0 for nodes of draft passes. `kind` is what the drafter says of where a node comes from: source
and match length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from freedraft.compiled import compiled
from freedraft.draft import DraftBatch

if TYPE_CHECKING:
    from freedraft.step import Step

KINDS = 128
# `DraftBatch.kinds` of nodes that draft passes made begin here, one for each recipe; n-gram drafters stay below
PASS_KINDS = 112
_BINS = 12
_DEPTHS = 8
_RATE = 0.03
_FAST_RATE, _TREND_RATE = 4.0, 0.2  # of d, by step, for a mean error of 1; of that error
_RISES = 0.1  # mean error
_MAX_CORRECTION, _MOST = 4.0, 10.0  # of a, b and c; of d
_BINS_AT, _KINDS_AT, _DEPTHS_AT, _COMMON_AT = 0, _BINS, _BINS + KINDS, _BINS + KINDS + _DEPTHS
SIZE = _COMMON_AT + 2
_GRID = 512


def _bins() -> NDArray[np.uint8]:
    """The bin of each share out of `_GRID`: one per unit of its logit."""
    share = (np.arange(_GRID) + 0.5) / _GRID
    return np.clip(np.log(share / (1 - share)) + _BINS / 2, 0, _BINS - 1).astype(np.uint8)


BIN_OF = _bins()


@compiled(inline="always")
def _given_parent(odds, bin_of, score, parents_score, kind, depth):
    """(P(node accepted | parent accepted), the four corrections that made it). odds: exp of the corrections, so that
    nothing but products is needed here."""
    ratio = min(max(score / max(parents_score, 1e-9), 1e-4), 0.9995)
    x = _BINS_AT + bin_of[int(ratio * _GRID)]
    y = _KINDS_AT + min(kind, KINDS - 1)
    d = _DEPTHS_AT + min(depth - 1, _DEPTHS - 1)
    f = _COMMON_AT + (kind >= PASS_KINDS)
    o = ratio * odds[x] * odds[y] * odds[d] * odds[f]
    return o / (o + 1.0 - ratio), x, y, d, f


@compiled(nogil=True)
def calibrate(odds, bin_of, parents, depths, scores, kinds, counts, out):
    """P(accepted) of every node by what was learnt. out: float64 [B, N]; 1 for the roots."""
    for b in range(len(counts)):
        out[b, 0] = 1.0
        for i in range(1, counts[b]):
            parent = parents[b, i]
            p, _, _, _, _ = _given_parent(odds, bin_of, scores[b, i], scores[b, parent], kinds[b, i], depths[b, i])
            out[b, i] = out[b, parent] * p


@compiled(nogil=True)
def _estimate(odds, bin_of, ratios, kinds, depth, out):
    for i in range(len(ratios)):
        out[i], _, _, _, _ = _given_parent(odds, bin_of, ratios[i], 1.0, kinds[i], depth)


@compiled(nogil=True)
def learn(bias, odds, trend, bin_of, tokens, parents, depths, scores, kinds, counts, rows, source, starts, ends):
    """Move the corrections by what became of a draft: at each node of the true path, which child came next.

    Args:
        trend: float64 [1], the mean error of the newest steps, which says how fast d moves.
        tokens, ..., counts: the draft, verified or not, with its roots.
        rows: int32 [B], which entry of starts and ends is this request's; -1: it has ended.
        source, starts, ends: source[starts[r]:ends[r]] are the tokens that the request has gained since.

    Returns:
        Outcomes seen.
    """
    seen, common, wrong = 0, 0, 0.0
    fast = (_RATE + _FAST_RATE * trend[0] ** 2) / max(1, len(counts))
    for b in range(len(counts)):
        r = rows[b]
        if r < 0:
            continue
        node = 0
        for at in range(starts[r], ends[r]):
            token = source[at]
            following = -1
            for i in range(node + 1, counts[b]):
                if parents[b, i] != node:
                    continue
                p, x, y, d, f = _given_parent(odds, bin_of, scores[b, i], scores[b, node], kinds[b, i], depths[b, i])
                hit = 1.0 if tokens[b, i] == token else 0.0
                for k in (x, y, d):
                    bias[k] = min(max(bias[k] + _RATE * (hit - p), -_MAX_CORRECTION), _MAX_CORRECTION)
                    odds[k] = np.exp(bias[k])
                if f == _COMMON_AT:
                    bias[f] = min(max(bias[f] + fast * (hit - p), -_MOST), _MOST)
                    odds[f] = np.exp(bias[f])
                    common += 1
                    wrong += hit - p
                seen += 1
                if hit > 0.0:
                    following = i
            if following < 0:
                break
            node = following
    if common > 0:
        trend[0] += _TREND_RATE * (wrong / common - trend[0])
    return seen


class Acceptance:
    """The corrections, and what they make of a draft."""

    def __init__(self) -> None:
        self.bias = np.zeros(SIZE)
        self.odds = np.ones(SIZE)
        self._trend = np.zeros(1)
        self.outcomes = 0
        self._request_ids: list[str] = []
        self._followed: list[tuple[DraftBatch, NDArray[np.int32]]] = []

    @staticmethod
    def warm_up() -> None:
        """Compile, or load from the cache, everything that a step calls."""
        draft = DraftBatch.empty(1, 2)
        draft.counts[:] = 2
        draft.depths[:, 1] = 1
        draft.scores[:] = 1.0, 0.5
        fresh, none = Acceptance(), np.zeros(1, np.int64)
        fresh.learn(draft, draft.counts, np.full(1, -1, np.int32), np.zeros(1, np.int32), none, none)
        fresh.probabilities(draft)
        fresh.given_parent(draft.scores[0], draft.kinds[0], 1)

    def forget(self, kind: int) -> None:
        """Nodes of this kind are another drafter's from now on."""
        self.bias[_KINDS_AT + kind], self.odds[_KINDS_AT + kind] = 0.0, 1.0

    @property
    def follows(self) -> bool:
        """Whether drafts were given to `follow` since the last `update`."""
        return bool(self._followed)

    @property
    def rises(self) -> bool:
        """Whether the newest steps accepted more than was expected, so that there is something to learn soon."""
        return bool(self._trend[0] > _RISES)

    def follow(self, *drafts: DraftBatch) -> None:
        """Learn at the next `update` from what becomes of these drafts of its last step's requests, verified or not.
        Their arrays, counts apart, must stay as they are until then."""
        self._followed = [(draft, draft.counts.copy()) for draft in drafts]

    def update(self, step: Step) -> None:
        """Learn from what requests gained of the drafts that were followed."""
        if self._followed:
            if step.request_ids == self._request_ids:
                rows = np.arange(len(self._request_ids), dtype=np.int32)
            else:
                at = {request_id: i for i, request_id in enumerate(step.request_ids)}
                rows = np.array([at.get(request_id, -1) for request_id in self._request_ids], np.int32)
            for draft, counts in self._followed:
                self.learn(draft, counts, rows, step.tokens, step.starts, step.ends)
            self._followed = []
        self._request_ids = list(step.request_ids)

    def probabilities(self, draft: DraftBatch) -> NDArray[np.float64]:
        """float64 [B, N]: estimated probability of every node; entries at and beyond `counts` are undefined."""
        out = np.empty(draft.tokens.shape)
        self.calibrate(draft, out)
        return out

    def calibrate(self, draft: DraftBatch, out: NDArray[np.float64]) -> None:
        """`probabilities` into `out`, float64 [B, N]."""
        calibrate(self.odds, BIN_OF, draft.parents, draft.depths, draft.scores, draft.kinds, draft.counts, out)

    def given_parent(
        self, confidences: NDArray[np.float32], kinds: NDArray[np.uint8], depth: int
    ) -> NDArray[np.float64]:
        """float64 [R]: the chance that nodes are accepted if their parents are.

        Args:
            confidences: float32 [R], the drafter's own probability of each node given its parent.
            kinds: uint8 [R], see `DraftBatch`.
            depth: of the nodes, at least 1.
        """
        out = np.empty(len(confidences))
        _estimate(self.odds, BIN_OF, confidences, kinds, depth, out)
        return out

    def observe(self, draft: DraftBatch, continuations: Sequence[NDArray[np.int32]]) -> int:
        """Learn from the tokens that followed each root of `draft`. Returns the number of nodes of which the outcome is
        known by that."""
        ends = np.cumsum([len(tokens) for tokens in continuations]).astype(np.int64)
        starts = np.concatenate([[0], ends[:-1]]).astype(np.int64)
        source = np.concatenate([np.asarray(tokens, np.int32) for tokens in continuations] or [np.zeros(0, np.int32)])
        rows = np.arange(len(continuations), dtype=np.int32)
        return self.learn(draft, draft.counts, rows, source, starts, ends)

    def learn(
        self,
        draft: DraftBatch,
        counts: NDArray[np.int32],
        rows: NDArray[np.int32],
        source: NDArray[np.int32],
        starts: NDArray[np.int64],
        ends: NDArray[np.int64],
    ) -> int:
        """`observe` on flat arrays, as `learn` of this module takes them; `counts` stand for the draft's own."""
        if len(rows) != draft.batch_size:
            raise ValueError(f"{len(rows)} rows for a draft of {draft.batch_size} requests")
        seen = learn(
            self.bias, self.odds, self._trend, BIN_OF,
            draft.tokens, draft.parents, draft.depths, draft.scores, draft.kinds, counts,
            rows, source, starts, ends,
        )  # fmt: skip
        self.outcomes += seen
        return seen
