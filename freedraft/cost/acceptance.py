"""`Acceptance`: probability that a draft node is accepted, from its score and from past verifications.

The probability that a node is accepted given that its parent was is modelled as

    sigmoid(logit(score / parent's score) + a[bin of that] + b[kind] + c[depth] + d)

with all of them 0 at first. Each outcome moves its four corrections along the gradient of its log-likelihood: a, b and
c by a fixed step, which follows a change within a few hundred outcomes; d by a step that grows with the mean error of
the newest steps, which notices within some ten steps that nothing is accepted any more. d applies to n-grams only, and
is 0 for nodes of draft passes. `kind` is the drafter's origin of a node: source and match length.
"""

from collections import namedtuple

import numpy as np
from numpy.typing import NDArray

from freedraft.compiled import compiled
from freedraft.draft import DraftBatch
from freedraft.step import Step, rows_in

KINDS = 1 << 7  # of `DraftBatch.kinds`, without its upper bits
# First of `DraftBatch.kinds` for nodes of draft passes, one per recipe; n-gram drafters use smaller ones
PASS_KINDS = 112
_BINS = 12
_DEPTHS = 8
_RATE = 0.03
_FAST_RATE, _TREND_RATE = 4.0, 0.2  # of d, by step, for a mean error of 1; of that error
_RISES = 0.1  # mean error
_MAX_CORRECTION, _MOST = 4.0, 10.0  # of a, b and c; of d
_KINDS_AT, _DEPTHS_AT, _COMMON_AT = _BINS, _BINS + KINDS, _BINS + KINDS + _DEPTHS
SIZE = _COMMON_AT + 2
_GRID = 512
# int64, bin of each share of `_GRID`: one per unit of its logit
_SHARES = (np.arange(_GRID) + 0.5) / _GRID
_BIN_OF = np.clip(np.log(_SHARES / (1 - _SHARES)) + _BINS / 2, 0, _BINS - 1).astype(np.int64)


# Arguments of compiled functions: the arrays of a `DraftBatch`; accepted tokens as in a `Step`, and the row of it of
# each request of the draft, -1 for those that have ended
_Nodes = namedtuple("_Nodes", ("tokens", "parents", "depths", "scores", "kinds", "counts"))
_Gained = namedtuple("_Gained", ("rows", "tokens", "starts", "ends"))


@compiled(inline="always")
def _given_parent(odds, ratio, kind, depth):
    """(P(node accepted | parent accepted), its four corrections). odds: exp of the corrections, so that products
    suffice; ratio: the node's score over its parent's."""
    ratio, kind = min(max(ratio, 1e-4), 0.9995), kind % KINDS
    x = _BIN_OF[int(ratio * _GRID)]
    y = _KINDS_AT + kind
    d = _DEPTHS_AT + min(depth - 1, _DEPTHS - 1)
    f = _COMMON_AT + (kind >= PASS_KINDS)
    o = ratio * odds[x] * odds[y] * odds[d] * odds[f]
    return o / (o + 1.0 - ratio), x, y, d, f


@compiled(inline="always")
def _of_node(odds, nodes, b, i):
    ratio = nodes.scores[b, i] / max(nodes.scores[b, nodes.parents[b, i]], 1e-9)
    return _given_parent(odds, ratio, nodes.kinds[b, i], nodes.depths[b, i])


@compiled(nogil=True)
def _calibrate(odds, nodes, out):
    """P(accepted) of every node. out: float64 [B, N]; 1 for the roots."""
    for b in range(len(nodes.counts)):
        out[b, 0] = 1.0
        for i in range(1, nodes.counts[b]):
            p, _, _, _, _ = _of_node(odds, nodes, b, i)
            out[b, i] = out[b, nodes.parents[b, i]] * p


@compiled(nogil=True)
def _estimate(odds, ratios, kinds, depth, out):
    for i in range(len(ratios)):
        out[i], _, _, _, _ = _given_parent(odds, ratios[i], kinds[i], depth)


@compiled(nogil=True)
def _learn(bias, odds, trend, nodes, gained):
    """Update the corrections from a draft's outcome: at each node of the true path, which child came next.
    trend: float64 [1], the mean error of the newest steps, which sets the step size of d."""
    common, wrong = 0, 0.0
    fast = (_RATE + _FAST_RATE * trend[0] ** 2) / max(1, len(nodes.counts))
    for b in range(len(nodes.counts)):
        r = gained.rows[b]
        if r < 0:
            continue
        node = 0
        for at in range(gained.starts[r], gained.ends[r]):
            following = -1
            for i in range(node + 1, nodes.counts[b]):
                if nodes.parents[b, i] != node:
                    continue
                p, x, y, d, f = _of_node(odds, nodes, b, i)
                hit = 1.0 if nodes.tokens[b, i] == gained.tokens[at] else 0.0
                for k in (x, y, d):
                    bias[k] = min(max(bias[k] + _RATE * (hit - p), -_MAX_CORRECTION), _MAX_CORRECTION)
                    odds[k] = np.exp(bias[k])
                if f == _COMMON_AT:
                    bias[f] = min(max(bias[f] + fast * (hit - p), -_MOST), _MOST)
                    odds[f] = np.exp(bias[f])
                    common += 1
                    wrong += hit - p
                if hit > 0.0:
                    following = i
            if following < 0:
                break
            node = following
    if common > 0:
        trend[0] += _TREND_RATE * (wrong / common - trend[0])


def _nodes(draft: DraftBatch, counts: NDArray[np.int32]) -> _Nodes:
    return _Nodes(draft.tokens, draft.parents, draft.depths, draft.scores, draft.kinds, counts)


class Acceptance:
    """Learns corrections from drafts and the tokens that followed, and applies them to new drafts. bias, odds: float64
    [SIZE], the corrections, and their exp."""

    def __init__(self) -> None:
        self.bias, self.odds = np.zeros(SIZE), np.ones(SIZE)
        self._trend = np.zeros(1)
        self._request_ids: list[str] = []
        self._followed: _Nodes | None = None

    @staticmethod
    def warm_up() -> None:
        """Compile, or load from the cache, everything that a step calls."""
        draft = DraftBatch.empty(1, 2)
        draft.counts[:] = 2
        draft.depths[:, 1] = 1
        draft.scores[:] = 1.0, 0.5
        draft.limit(np.ones(1, np.int32), np.ones(1, np.bool_))
        fresh, none = Acceptance(), np.zeros(1, np.int64)
        gained = _Gained(np.full(1, -1, np.int32), np.zeros(1, np.int32), none, none)
        _learn(fresh.bias, fresh.odds, fresh._trend, _nodes(draft, draft.counts), gained)
        fresh.probabilities(draft)
        fresh.given_parent(draft.scores[0], draft.kinds[0], 1)

    def forget(self, kind: int) -> None:
        """Reset the correction of this kind, which another recipe uses from now on."""
        self.bias[_KINDS_AT + kind], self.odds[_KINDS_AT + kind] = 0.0, 1.0

    @property
    def follows(self) -> bool:
        """Whether the outcome of drafts is still to be learnt."""
        return self._followed is not None

    @property
    def rises(self) -> bool:
        """Whether the newest steps accepted more than expected."""
        return bool(self._trend[0] > _RISES)

    def follow(self, draft: DraftBatch | None) -> None:
        """Register drafts, verified or not, for the next `update` to learn from; None: none. Their arrays, except
        counts, must not change until then."""
        self._followed = None if draft is None else _nodes(draft, draft.counts.copy())

    def update(self, step: Step) -> None:
        """Learn the outcome of the drafts that `follow` was given."""
        if self._followed is not None:
            rows = rows_in(step.request_ids, self._request_ids)
            gained = _Gained(rows, step.tokens, step.starts, step.ends)
            _learn(self.bias, self.odds, self._trend, self._followed, gained)
            self._followed = None
        self._request_ids = list(step.request_ids)

    def probabilities(self, draft: DraftBatch) -> NDArray[np.float64]:
        """float64 [B, N]: estimated probability of every node; entries at and beyond `counts` are undefined."""
        out = np.empty(draft.tokens.shape)
        _calibrate(self.odds, _nodes(draft, draft.counts), out)
        return out

    def given_parent(
        self, confidences: NDArray[np.float32], kinds: NDArray[np.uint16], depth: int
    ) -> NDArray[np.float64]:
        """float64 [R]: probability that nodes at a depth of at least 1 are accepted if their parents are. confidences:
        float32 [R], the drafter's own probability of that; kinds: uint16 [R], see `DraftBatch`."""
        out = np.empty(len(confidences))
        _estimate(self.odds, np.ascontiguousarray(confidences), kinds, depth, out)  # one signature
        return out
