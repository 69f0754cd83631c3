"""SWIFT (Xia et al. 2025): the skip set is searched while serving, on the newest tokens of the traffic."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from layerskip_plugin.selection.base import Counts, Evaluate, SearchingSelection
from layerskip_plugin.selection.bit_search import BitSearch
from layerskip_plugin.skip_set import SkipSet

WINDOW = 32
BETA = 25
MAX_CANDIDATES = 8
"""Candidates in one batch, beside the incumbent."""
CONFIRM, LEAD = 3, 0.01
"""Windows over which a challenger must lead together, and its mean lead."""
DROP = 0.1
"""Fall of live acceptance below that at the end of a search that starts the next one."""
LOW, HIGH, NOTCH = 0.6, 0.92, 0.05
"""Where the matchness of the best set lies outside of these, the next search skips a notch fewer or more sublayers."""


class Swift(SearchingSelection):
    """One set for all requests, searched by `step` in batches that fit the time it is given.

    Every batch scores the incumbent and new candidates on the same, newest window, so that they are compared on the
    same tokens. The best candidate that beats the incumbent becomes its challenger and replaces it only if it also does
    so on the next `CONFIRM` windows together: the best of many noisy scores alone would be luck. Every `beta`-th
    candidate is the Gaussian process's, the others are random. The search ends after `patience` candidates without a
    better one; then the ratio moves a notch if matchness asks for it, and the set with it. It begins again when live
    acceptance falls.

    Args:
        n_layers, model: of the sets.
        evaluate: matchness over the newest `WINDOW` tokens of the traffic; one batched forward.
        ratio: share of the sublayers skipped at first.
        protected: sublayers that are never skipped.
        beta, patience: see above.
        seed: of all randomness.
        clock: gives seconds; tests pass their own.
    """

    def __init__(
        self,
        n_layers: int,
        evaluate: Evaluate,
        model: str = "",
        ratio: float = 0.3,
        protected: Iterable[int] = (),
        beta: int = BETA,
        patience: int = 200,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not 0 < ratio < 1:
            raise ValueError(f"selection swift: ratio must lie between 0 and 1, not {ratio}")
        self.evaluate, self.beta, self.patience, self.clock = evaluate, beta, patience, clock
        self.space = BitSearch(n_layers, model, protected, seed=seed)
        self.ratio = min(ratio, len(self.space.skippable) / (2 * n_layers))
        self.incumbent = SkipSet.empty(n_layers, model)
        self.acceptance, self.acceptance_at_end, self.trials = 0.0, 0.0, 0.0
        self.last_move = 0
        self.seconds_per_set, self.seconds_per_proposal = 0.0, 0.0
        self.warm = False  # the first batch takes longer than any other
        self._restart()

    @property
    def searching(self) -> bool:
        return self.idle < self.patience

    @property
    def batch_seconds(self) -> float:
        return (MAX_CANDIDATES + 1) * self.seconds_per_set + self.seconds_per_proposal

    def sets(self) -> dict[str, SkipSet]:
        return {"swift": self.incumbent}

    def step(self, seconds: float, max_batches: int = 10**9) -> bool:
        """Score batches until the time is used up; a batch begins only if it is expected to fit.

        The first two always run: before, it is not known what they take. While the window stays the same, one batch is
        enough: scored again on the same tokens, luck would look like merit.
        """
        before, end = self.incumbent, self.clock() + seconds
        for _ in range(max_batches):
            if not self.searching:
                break
            count = self._batch_size(end - self.clock())
            if count < 1:
                break
            start = self.clock()
            scored = self._score(count)
            per_set = (self.clock() - start) / scored
            if self.warm:
                self.seconds_per_set += (per_set - self.seconds_per_set) * (0.3 if self.seconds_per_set else 1.0)
            self.warm = True
        if not self.searching and not self.settled:
            self._settle()
        return self.incumbent != before

    def record_acceptance(
        self, request_ids: Sequence[str], drafted: Counts, accepted: Counts, skip_set: SkipSet
    ) -> None:
        verified = float(np.minimum(np.asarray(drafted), np.asarray(accepted) + 1).sum())
        if not verified:
            return
        # Acceptance over about the newest 200 verified tokens.
        self.trials = min(self.trials + verified, 200.0)
        self.acceptance += (float(np.sum(accepted)) / verified - self.acceptance) * min(1.0, verified / self.trials)
        if self.searching or self.trials < 100:
            return
        if not self.acceptance_at_end:
            self.acceptance_at_end = self.acceptance
        elif self.acceptance < self.acceptance_at_end - DROP:
            self.last_move = 0
            self._restart()

    def _restart(self) -> None:
        """Search anew at the present ratio; the incumbent stays, with some sublayers more or less where its size is
        another one, to be scored again."""
        size = max(1, min(len(self.space.skippable), round(self.ratio * 2 * self.space.n_layers)))
        self.space.resize(size)
        if len(self.incumbent) != size:
            self.incumbent = self.space.resized(self.incumbent) if self.incumbent else self.space.uniform()
            self._forget_acceptance()
        self.challenger: SkipSet | None = None
        self.matchness, self.lead, self.windows = 0.0, 0.0, 0
        self.candidates = self.idle = 0
        self.settled = False
        self.acceptance_at_end = 0.0

    def _forget_acceptance(self) -> None:
        """Live acceptance was another set's."""
        self.acceptance, self.trials = 0.0, 0.0

    def _batch_size(self, seconds: float) -> int:
        """How many candidates, beside the incumbent, are expected to be scored within `seconds`."""
        if not self.seconds_per_set:
            return int(not self.warm or seconds > 0)
        in_time = int((seconds - self.seconds_per_proposal) / self.seconds_per_set) - 1
        return min(MAX_CANDIDATES, self.patience, in_time)

    def _score(self, count: int) -> int:
        """Score the incumbent and `count` candidates, the challenger among them; returns how many sets were scored."""
        first = not self.space.values
        batch = [self.incumbent] if self.challenger is None else [self.incumbent, self.challenger]
        # The start is scored alone, before anything may replace it. Attempts are limited: a small model has few sets.
        for _ in range(0 if first else 4 * count):
            if len(batch) > count:
                break
            self.candidates += 1
            skip = self._propose()
            if skip not in batch:
                batch.append(skip)
        scores = np.asarray(self.evaluate(batch), np.float64)
        self.space.register(batch, scores)
        self.matchness = float(scores[0]) if first else 0.8 * self.matchness + 0.2 * float(scores[0])
        self.idle += max(1, len(batch) - 1)
        self._replace(batch[1:], scores[1:] - scores[0])
        return len(batch)

    def _replace(self, candidates: list[SkipSet], leads: NDArray[np.float64]) -> None:
        """Make the challenger the incumbent once it has led long enough, or the best candidate the challenger."""
        if self.challenger is not None:
            # The lead that made it the challenger was the largest of many: it does not count.
            self.lead, self.windows = self.lead + float(leads[0]), self.windows + 1
            won = self.windows == CONFIRM and self.lead >= CONFIRM * LEAD
            if won:
                self.incumbent, self.idle = self.challenger, 0
                self._forget_acceptance()
                self.matchness += self.lead / CONFIRM
            elif self.lead > 0 and self.windows < CONFIRM:
                return
            self.challenger = None
            if won:
                # The others were measured against the old incumbent.
                return
            candidates, leads = candidates[1:], leads[1:]
        if candidates and leads.max() > 0:
            self.challenger, self.lead, self.windows = candidates[int(np.argmax(leads))], 0.0, 0

    def _propose(self) -> SkipSet:
        if self.candidates % self.beta:
            return self.space.random()
        start = self.clock()
        skip = self.space.bayesian()
        # Paid once in `beta` candidates, but it must fit into the step that it falls in.
        self.seconds_per_proposal = self.clock() - start
        return skip

    def _settle(self) -> None:
        """End the search: keep the set, or search again with a neighbouring ratio."""
        self.settled = True
        move = 1 if self.matchness > HIGH else -1 if self.matchness < LOW else 0
        ratio, max_ratio = self.ratio + move * NOTCH, len(self.space.skippable) / (2 * self.space.n_layers)
        # Never back to where it came from: it would swing between two ratios for ever.
        if move and move != -self.last_move and NOTCH / 2 < ratio < max_ratio:
            self.ratio, self.last_move = ratio, move
            self._restart()
