"""`Auto`: the draft tokens that maximise expected tokens per second over the batch, step by step.

`Acceptance` estimates the probability p of every draft node, `StepTimes` the step time t by query tokens. With the n
likeliest nodes of the batch, a step yields b + p_1 + ... + p_n tokens in t(b + n) seconds; the n of the best ratio is
verified; it may be 0 (the tokens per time of KnapSpec, over a batch).
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freedraft.cost.allocation import FREE, allocate, allocate_width
from freedraft.cost.controller import Controller, holding
from freedraft.cost.measured import Measured
from freedraft.cost.probes import Probes
from freedraft.cost.step_times import MAX_QUERY_TOKENS, row_of
from freedraft.draft import DraftBatch
from freedraft.step import Step

_GAIN_RATE = 0.1


class Auto(Controller):
    """Policy "auto"."""

    measured: Measured

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.probes = Probes()
        self.gain = 0.0
        self.drafting_seconds = 0.0
        self._longest = float(self.max_draft_tokens)
        self._drafts_pay = False
        self._tail = 0.0  # tokens of the last step that were expected behind a head's

    def learn(self, step: Step) -> None:
        super().learn(step)
        if self.head is not None and self._tail > 0.0:
            self.head.learn_tails(step, self._tail / step.batch_size)
            self._tail = 0.0

    def rests(self) -> bool:
        # A rest keeps one token of each request; with a head, steps without drafts of ours give more.
        if self.head is not None or self.measured.acceptance.follows or not self.probes.take_rest():
            return False
        self.measured.skip()  # of the steps of a rest, one is timed
        return True

    def plan(self, step: Step) -> int:
        batch = step.batch_size
        if batch == 0:
            return 0
        if self.probes.take_rest():
            self.speedup = 1.0
            return 0
        wanted = int(2.0 * self._longest) + 2
        if self.widths is not None:  # up, or no longer width would ever be drafted for again
            wanted = int(holding(np.array(wanted + 1), self.widths)) - 1
        draft_len = min(self.max_tokens_per_request(batch), step.most, wanted)
        return self._fitting(min(draft_len, MAX_QUERY_TOKENS // batch - 1))

    def cut(self, draft: DraftBatch) -> None:
        batch = draft.batch_size
        p, seconds = self.measured.acceptance.probabilities(draft), self._seconds(draft)
        if self.head is not None:
            p[:, : self.head.length + 1] = 0.0
        self.measured.acceptance.follow(draft)
        forced = self._probe(batch, seconds)
        chosen, gain, longest = self._allocate(p, draft.counts, seconds, forced)
        self.budget = chosen if self.widths is None else batch * (max(chosen, 1) - 1)
        if self.head is not None:
            self._tail = p[np.arange(draft.max_nodes) < draft.counts[:, None]].sum()
        if forced == FREE:
            self.gain += _GAIN_RATE * (gain - self.gain)
        self._drafts_pay = self.budget > 0
        self.speedup = 1.0 + self.gain if self._drafts_pay else 1.0
        self._longest = max(longest - 1.0, 0.97 * self._longest)

    def done(self, step: Step) -> None:
        batch, measured = step.batch_size, self.measured
        if measured.acceptance.follows:
            spent = measured.clock() - measured.began
            if 0.0 < spent < 1.0:
                rate = 0.5 if self.drafting_seconds == 0.0 else 0.05
                self.drafting_seconds += rate * (min(spent, 4 * self.drafting_seconds or spent) - self.drafting_seconds)
            if self.gain < 0.0 and not measured.acceptance.rises:
                self.probes.begin_rest(self.drafting_seconds, float(measured.step_seconds(batch, batch)))
        super().done(step)

    def _seconds(self, draft: DraftBatch) -> NDArray[np.float64]:
        """Step time by number of verified draft nodes; with widths, of a step without drafts and of each width."""
        batch = draft.batch_size
        if self.widths is None:
            return self.measured.step_seconds(batch, batch + np.arange(draft.draft_tokens + 1))
        return self.measured.step_seconds(batch, batch * np.concatenate([self.widths[:1], self.widths]))

    def _allocate(
        self, p: NDArray[np.float64], counts: NDArray[np.int32], seconds: NDArray[np.float64], forced: int = FREE
    ) -> tuple[int, float, int]:
        if self.widths is None:
            return allocate(p, counts, seconds, self.drafting_seconds, forced)
        share, undrafted = (1.0, 1.0) if self.head is None else (self.head.share, 1.0 + self.head.accepted)
        return allocate_width(share * p, counts, seconds, self.drafting_seconds, forced, self.widths, undrafted)

    def _probe(self, batch: int, seconds: NDArray[np.float64]) -> int:
        """Now and then, a random number of draft tokens (an index of widths) instead of the best."""
        if len(seconds) < 2 or not self.probes.due(row_of(batch, self.measured.context), eager=self._drafts_pay):
            return FREE
        affordable = len(self.probes.affordable(seconds))
        if self.widths is not None:
            return int(self.probes.random.integers(max(1, affordable - 1)))
        octaves = math.log2(max(1, affordable - 1))
        return int(2 ** (self.probes.random.random() * (octaves + 1)) - 1)

    def warm_up(self) -> None:
        super().warm_up()
        seconds = np.ones(2 if self.widths is None else 1 + len(self.widths))
        self._allocate(np.ones((1, 2)), np.full(1, 2, np.int32), seconds)
