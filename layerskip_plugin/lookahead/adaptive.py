"""Confidence thresholds that follow what verification accepts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from freedraft.hybrid.choice import RestOfBatch
from layerskip_plugin.lookahead.base import Flags, Floats, Ints, Lookahead, Places, RequestTable, RoundLog, unit


class DraftVerify(Lookahead):
    """Draft & Verify's threshold (Zhang et al. 2024, section 3.3), one per request.

    After each round of a request, with its acceptance rate a and the threshold g:
        rate <- memory * rate + (1 - memory) * a
        g <- inertia * g + (1 - inertia) * (g + step  if rate < target  else  g - step)
    A round that was cut by the length limit with everything accepted leaves g as it is. A new request starts from the
    running mean of those that ended.
    """

    needs_top = 1

    def __init__(
        self,
        threshold: float = 0.7,
        target: float = 0.9,
        memory: float = 0.5,
        step: float = 0.01,
        inertia: float = 0.9,
    ) -> None:
        self.target, self.memory, self.inertia = (
            unit("target", target),
            unit("memory", memory),
            unit("inertia", inertia),
        )
        self.step = step
        self.table = RequestTable((unit("threshold", threshold), self.target))

    def begin(
        self, request_ids: Sequence[str], sets: Places, max_draft_tokens: int, rest: RestOfBatch | None = None
    ) -> None:
        super().begin(request_ids, sets, max_draft_tokens, rest)
        rows = self.table.rows(request_ids)  # first: it may put a larger array in the place of `values`
        self.thresholds = self.table.values[rows, 0]

    def should_continue(self, position: int, rows: Ints, top: Floats, entropy: Floats | None) -> Flags:
        if position + 1 >= self.max_draft_tokens:
            return np.zeros(len(rows), np.bool_)
        return top[:, 0] >= self.thresholds[rows]

    def record_acceptance(self, request_ids: Sequence[str], drafted: Ints, accepted: Ints, path: Ints) -> None:
        drafted, accepted = np.asarray(drafted), np.asarray(accepted)
        some = np.flatnonzero(drafted > 0)
        if not len(some):
            return
        rows = self.table.rows([request_ids[i] for i in some])
        drafted, accepted = drafted[some], accepted[some]
        threshold, rate = self.table.values[rows].T
        rate = self.memory * rate + (1 - self.memory) * accepted / drafted
        cut = (drafted >= self.max_draft_tokens) & (accepted == drafted)
        change = np.where(rate < self.target, self.step, np.where(cut, 0.0, -self.step))
        threshold = np.clip(threshold + (1 - self.inertia) * change, 0.0, 1.0)
        self.table.values[rows] = np.stack([threshold, rate], 1)

    def finish(self, request_ids: Sequence[str]) -> None:
        known = [request for request in request_ids if request in self.table._slot]
        if known:
            ended = self.table.values[self.table.rows(known), 0].mean()
            self.table.fresh[0] += (ended - self.table.fresh[0]) * min(1.0, 0.1 * len(known))
        self.table.drop(known)


class RocThreshold(Lookahead):
    """Transformers' adaptive threshold (`assistant_confidence_threshold`), over all requests.

    Of the newest `window` judged tokens it takes the threshold t that minimises FPR(t) + `miss_cost` * FNR(t), where
    a token is called good when its probability is at least t. Until `enough` tokens of both kinds were seen: the first
    threshold. One threshold for all requests, found anew after every `enough` judged tokens.
    """

    needs_top = 1

    def __init__(self, threshold: float = 0.4, miss_cost: float = 3.0, window: int = 512, enough: int = 6) -> None:
        self.threshold, self.miss_cost, self.enough = unit("threshold", threshold), miss_cost, enough
        self.log = RoundLog(1)
        self.probability, self.good = np.zeros(window, np.float32), np.zeros(window, np.bool_)
        self.seen = self.fitted = 0

    def begin(
        self, request_ids: Sequence[str], sets: Places, max_draft_tokens: int, rest: RestOfBatch | None = None
    ) -> None:
        super().begin(request_ids, sets, max_draft_tokens, rest)
        self.log.begin(request_ids, max_draft_tokens)

    def should_continue(self, position: int, rows: Ints, top: Floats, entropy: Floats | None) -> Flags:
        self.log.put(position, rows, top[:, :1])
        if position + 1 >= self.max_draft_tokens:
            return np.zeros(len(rows), np.bool_)
        return top[:, 0] >= self.threshold

    def record_acceptance(self, request_ids: Sequence[str], drafted: Ints, accepted: Ints, path: Ints) -> None:
        features, _, good, _ = self.log.judged(request_ids, drafted, accepted)
        window = len(self.good)
        features, good = features[-window:, 0], good[-window:]
        place = (self.seen + np.arange(len(good))) % window
        self.probability[place], self.good[place] = features, good
        self.seen += len(good)
        if self.seen - self.fitted >= self.enough:
            self.fitted = self.seen
            held = min(self.seen, window)
            self.threshold = best_threshold(
                self.probability[:held], self.good[:held], self.miss_cost, otherwise=self.threshold
            )


def best_threshold(probability: Floats, good: Flags, miss_cost: float, otherwise: float) -> float:
    """The threshold among the probabilities that minimises FPR + `miss_cost` * FNR; the highest one of equals.

    Args:
        probability: float32[N].
        good: bool[N], what was accepted.
        miss_cost: price of stopping at a good token, in prices of going on after a bad one.
        otherwise: returned when one of the two kinds is missing.
    """
    n_good = int(good.sum())
    if not 0 < n_good < len(good):
        return otherwise
    order = np.argsort(-probability, kind="stable")
    sorted_probability, sorted_good = probability[order], good[order]
    # One candidate per distinct value: everything at or above it is called good.
    last = np.flatnonzero(np.append(sorted_probability[1:] != sorted_probability[:-1], True))
    true_positive = np.cumsum(sorted_good)[last]
    false_positive = last + 1 - true_positive
    cost = false_positive / (len(good) - n_good) + miss_cost * (1 - true_positive / n_good)
    return float(sorted_probability[last[np.argmin(cost)]])
