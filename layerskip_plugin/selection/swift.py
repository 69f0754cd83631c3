"""SWIFT (Xia et al. 2025): the skip set is searched while serving, on the newest tokens of the traffic."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from layerskip_plugin.selection.base import Evaluate, Selection
from layerskip_plugin.selection.bit_search import BitSearch
from layerskip_plugin.skip_set import SkipSet

WINDOW = 32
BETA = 25
MOST = 8
"""Candidates in one batch, beside the incumbent."""
CONFIRM, LEAD = 3, 0.01
"""Windows that a challenger must lead on together, and by how much on average."""
DROP = 0.1
"""Fall of live acceptance below that at the end of the search that starts it again."""
LOW, HIGH, NOTCH = 0.6, 0.92, 0.05
"""Where the matchness of the best set lies outside, the next search skips fewer or more sublayers."""


class Swift(Selection):
    """One set for all requests. Searches with `step`, in batches that fit the time it is given.

    Every batch scores the incumbent and new candidates on the same, newest window, so that they are compared on the
    same tokens. The best candidate that beats the incumbent becomes its challenger and replaces it only if it also does
    so on the next `CONFIRM` windows together: the best of many noisy scores alone would be luck. Every `beta`-th
    candidate is the Gaussian process's, the others are random. The search ends after `patience` candidates without a
    better one, then the ratio moves a notch if matchness says so; it begins again when live acceptance falls.

    Args:
        n_layers, model: of the sets.
        evaluate: matchness over the newest `WINDOW` tokens of the traffic; one batched forward.
        ratio: share of the sublayers skipped at first.
        kept: sublayers that are never skipped.
        beta, patience, seed: see above.
        clock: for tests.
    """

    searches = True

    def __init__(
        self,
        n_layers: int,
        evaluate: Evaluate,
        model: str = "",
        ratio: float = 0.3,
        kept: Iterable[int] = (),
        beta: int = BETA,
        patience: int = 200,
        seed: int = 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if not 0 < ratio < 1:
            raise ValueError(f"selection swift: ratio must lie between 0 and 1, not {ratio}")
        self.evaluate, self.beta, self.patience, self.clock = evaluate, beta, patience, clock
        self.space = BitSearch(n_layers, model, kept, seed=seed)
        self.ratio = min(ratio, len(self.space.free) / (2 * n_layers))
        self.live, self.at_end = 0.0, 0.0
        self.trials = 0.0
        self.moved = 0
        self.seconds_per_set, self.seconds_of_step = 0.0, 0.0
        self._restart()

    @property
    def searching(self) -> bool:
        """Whether `step` has anything to do."""
        return self.idle < self.patience

    @property
    def batch_seconds(self) -> float:
        """What a batch of the most candidates is expected to take; 0 before the first one."""
        return (MOST + 1) * self.seconds_per_set + self.seconds_of_step

    def sets(self) -> dict[str, SkipSet]:
        return {"swift": self.incumbent}

    def choose(self, request_ids: Sequence[str], context: NDArray[np.int32]) -> NDArray[np.intp]:
        return np.zeros(len(request_ids), np.intp)

    def step(self, seconds: float, batches: int = 10**9) -> bool:
        """Score batches until the time is used up, or so many; a batch begins only if it is expected to fit.

        The first batch ever is always run: nothing is known of its price. While the window stays the same one batch is
        enough: scored again on the same tokens, luck would look like merit.
        """
        before, end = self.incumbent, self.clock() + seconds
        for _ in range(batches):
            if not self.searching:
                break
            wanted = self._wanted(end - self.clock())
            if wanted < 1:
                break
            start = self.clock()
            scored = self._score(wanted)
            per_set = (self.clock() - start) / scored
            self.seconds_per_set += (per_set - self.seconds_per_set) * (0.3 if self.seconds_per_set else 1.0)
        if not self.searching and not self.settled:
            self._settle()
        return self.incumbent != before

    def observe(self, request_ids: Sequence[str], drafted: NDArray[np.int32], accepted: NDArray[np.int32]) -> None:
        tried = float(np.minimum(np.asarray(drafted), np.asarray(accepted) + 1).sum())
        if not tried:
            return
        # About the newest 200 judged tokens.
        self.trials = min(self.trials + tried, 200.0)
        self.live += (float(np.sum(accepted)) / tried - self.live) * min(1.0, tried / self.trials)
        if self.searching or self.trials < 100:
            return
        if not self.at_end:
            self.at_end = self.live
        elif self.live < self.at_end - DROP:
            self.moved = 0
            self._restart()

    def _restart(self) -> None:
        """Search anew at the present ratio; an incumbent of the right size stays, to be scored again."""
        size = max(1, min(len(self.space.free), round(self.ratio * 2 * self.space.n_layers)))
        self.space.resize(size)
        held = getattr(self, "incumbent", None)
        self.incumbent = held if held is not None and len(held) == size else self.space.uniform()
        self.challenger: SkipSet | None = None
        self.matchness, self.lead, self.windows = 0.0, 0.0, 0
        self.candidates = self.idle = 0
        self.settled = False
        self.at_end = 0.0

    def _wanted(self, left: float) -> int:
        """How many candidates the next batch may hold beside the incumbent."""
        if not self.seconds_per_set:
            return 1
        return min(MOST, self.patience, int((left - self.seconds_of_step) / self.seconds_per_set) - 1)

    def _score(self, count: int) -> int:
        first = not self.space.values
        fresh: list[SkipSet] = []
        if self.challenger is not None:
            fresh.append(self.challenger)
        # A small model has few sets: not for ever.
        for _ in range(0 if first else 4 * count):
            if len(fresh) >= count:
                break
            self.candidates += 1
            skip = self._propose()
            if skip != self.incumbent and skip not in fresh:
                fresh.append(skip)
        # The incumbent alone in the first batch: the start is scored before anything may replace it.
        asked = [self.incumbent, *fresh]
        scores = np.asarray(self.evaluate(asked), np.float64)
        self.space.register(asked, scores)
        self.matchness = float(scores[0]) if first else 0.8 * self.matchness + 0.2 * float(scores[0])
        self.idle += max(1, len(fresh))
        self._replace(fresh, scores[1:] - scores[0])
        return len(asked)

    def _replace(self, fresh: list[SkipSet], leads: NDArray[np.float64]) -> None:
        if self.challenger is not None:
            # The lead that made it the challenger was the largest of many: it does not count.
            self.lead, self.windows = self.lead + float(leads[0]), self.windows + 1
            won = self.windows == CONFIRM and self.lead >= CONFIRM * LEAD
            if won:
                self.incumbent, self.idle = self.challenger, 0
                self.matchness += self.lead / CONFIRM
            elif self.lead > 0 and self.windows < CONFIRM:
                return
            self.challenger = None
            if won:
                # The others were measured against the old incumbent.
                return
            fresh, leads = fresh[1:], leads[1:]
        if len(fresh) and leads.max() > 0:
            self.challenger, self.lead, self.windows = fresh[int(np.argmax(leads))], 0.0, 0

    def _propose(self) -> SkipSet:
        if self.candidates % self.beta:
            return self.space.random()
        start = self.clock()
        skip = self.space.bayesian()
        # Paid once in `beta` candidates, but it must fit into the step that it falls in.
        self.seconds_of_step = self.clock() - start
        return skip

    def _settle(self) -> None:
        """The search has ended: keep the set, or search on with a neighbouring ratio."""
        self.settled = True
        way = 1 if self.matchness > HIGH else -1 if self.matchness < LOW else 0
        ratio = self.ratio + way * NOTCH
        # Never back to where it came from: it would swing between two ratios for ever.
        if way and way != -self.moved and NOTCH / 2 < ratio < len(self.space.free) / (2 * self.space.n_layers):
            self.ratio, self.moved = ratio, way
            self._restart()
