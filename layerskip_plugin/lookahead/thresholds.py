"""Policies without costs: a fixed number of tokens, a threshold of confidence, fixed or following acceptance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from freedraft.draft_pass import RestOfBatch
from layerskip_plugin.lookahead.base import ALONE, Flags, Floats, Ints, Lookahead
from layerskip_plugin.skip_set import SkipSet


class Fixed(Lookahead):
    """Draft `length` tokens, or as many as are allowed."""

    def __init__(self, length: int) -> None:
        self.length = length

    def expected_len(self) -> int:
        return min(self.length, self.max_draft_len)

    def should_continue(self, position: int, rows: Ints, top: Floats, entropy: Floats | None) -> Flags:
        return np.full(len(rows), position + 1 < self.expected_len())


class Confidence(Lookahead):
    """Go on while the draft token's top-1 probability is at least `threshold`; the token below it is kept.

    Draft & Verify and SWIFT use .8, KnapSpec .7.
    """

    needs_top = 1

    def __init__(self, threshold: float = 0.7) -> None:
        self.threshold = threshold

    def should_continue(self, position: int, rows: Ints, top: Floats, entropy: Floats | None) -> Flags:
        return (top[:, 0] >= self.threshold) & (position + 1 < self.max_draft_len)


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
        self.target, self.memory, self.step, self.inertia = target, memory, step, inertia
        self.first_threshold = threshold
        self.requests: dict[str, tuple[float, float]] = {}  # threshold and acceptance rate

    def begin(self, request_ids: Sequence[str], recipe: SkipSet, max_draft_len: int, rest: RestOfBatch = ALONE) -> None:
        super().begin(request_ids, recipe, max_draft_len, rest)
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
