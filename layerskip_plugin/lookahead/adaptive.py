"""Confidence thresholds that follow what verification accepts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from freedraft.draft_pass import RestOfBatch
from layerskip_plugin.lookahead.base import ALONE, Flags, Floats, Ints, Lookahead, Places, RoundLog, unit


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
        self, threshold: float = 0.7, target: float = 0.9, memory: float = 0.5, step: float = 0.01, inertia: float = 0.9
    ) -> None:
        self.target, self.step = unit("target", target), step
        self.memory, self.inertia = unit("memory", memory), unit("inertia", inertia)
        self.first_threshold = unit("threshold", threshold)
        # Threshold and acceptance rate by request.
        self.requests: dict[str, tuple[float, float]] = {}

    def begin(self, request_ids: Sequence[str], sets: Places, max_draft_len: int, rest: RestOfBatch = ALONE) -> None:
        super().begin(request_ids, sets, max_draft_len, rest)
        for request in request_ids:
            self.requests.setdefault(request, (self.first_threshold, self.target))
        self.thresholds = np.array([self.requests[request][0] for request in request_ids])

    def should_continue(self, position: int, rows: Ints, top: Floats, entropy: Floats | None) -> Flags:
        return (top[:, 0] >= self.thresholds[rows]) & (position + 1 < self.max_draft_len)

    def record_acceptance(self, request_ids: Sequence[str], drafted: Ints, accepted: Ints, path: Ints) -> None:
        some = [i for i, request in enumerate(request_ids) if drafted[i] > 0 and request in self.requests]
        if not some:
            return
        names, drafted, accepted = [request_ids[i] for i in some], drafted[some], accepted[some]
        threshold, rate = np.array([self.requests[request] for request in names]).T
        rate = self.memory * rate + (1 - self.memory) * accepted / drafted
        cut = (drafted >= self.max_draft_len) & (accepted == drafted)
        change = np.where(rate < self.target, self.step, np.where(cut, 0.0, -self.step))
        threshold = np.clip(threshold + (1 - self.inertia) * change, 0.0, 1.0)
        self.requests.update(zip(names, zip(threshold.tolist(), rate.tolist(), strict=True), strict=True))

    def finish(self, request_ids: Sequence[str]) -> None:
        ended = [self.requests.pop(request)[0] for request in request_ids if request in self.requests]
        if ended:
            self.first_threshold += (sum(ended) / len(ended) - self.first_threshold) * min(1.0, 0.1 * len(ended))


class RocThreshold(Lookahead):
    """Transformers' adaptive threshold (`assistant_confidence_threshold`), over all requests.

    Of the newest `window` verified tokens it takes the threshold t that minimises FPR(t) + `miss_cost` * FNR(t), where
    a token is called good when its probability is at least t. Until `enough` tokens of both kinds were seen: the first
    threshold. One threshold for all requests, fitted anew after every `enough` verified tokens.
    """

    needs_top = 1

    def __init__(self, threshold: float = 0.4, miss_cost: float = 3.0, window: int = 512, enough: int = 6) -> None:
        self.threshold, self.miss_cost, self.enough = unit("threshold", threshold), miss_cost, enough
        self.log = RoundLog(1)
        self.probability, self.good = np.zeros(window, np.float32), np.zeros(window, np.bool_)
        self.seen = self.fitted = 0

    def begin(self, request_ids: Sequence[str], sets: Places, max_draft_len: int, rest: RestOfBatch = ALONE) -> None:
        super().begin(request_ids, sets, max_draft_len, rest)
        self.log.begin(request_ids, max_draft_len)

    def should_continue(self, position: int, rows: Ints, top: Floats, entropy: Floats | None) -> Flags:
        self.log.put(position, rows, top[:, :1])
        return (top[:, 0] >= self.threshold) & (position + 1 < self.max_draft_len)

    def record_acceptance(self, request_ids: Sequence[str], drafted: Ints, accepted: Ints, path: Ints) -> None:
        features, _, good, _ = self.log.verified(request_ids, drafted, accepted)
        window = len(self.good)
        features, good = features[-window:, 0], good[-window:]
        place = (self.seen + np.arange(len(good))) % window
        self.probability[place], self.good[place] = features, good
        self.seen += len(good)
        if self.seen - self.fitted >= self.enough:
            self.fitted = self.seen
            # Until the window is full, its end is empty.
            probability, good = self.probability[: self.seen], self.good[: self.seen]
            self.threshold = best_threshold(probability, good, self.miss_cost, otherwise=self.threshold)


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
