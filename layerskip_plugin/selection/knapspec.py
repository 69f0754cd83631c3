"""KnapSpec (arXiv 2602.20217) while serving: sets of all sizes from the newest tokens, chosen by tokens per time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from layerskip_plugin.knapsack_search import integer_weights
from layerskip_plugin.pass_times import PassTimes, tokens_per_time
from layerskip_plugin.selection.base import Counts, Evaluate, SearchingSelection
from layerskip_plugin.selection.bit_search import BitSearch
from layerskip_plugin.selection.swift import WINDOW
from layerskip_plugin.skip_set import SkipSet

Propose = Callable[[tuple[int, int], int, SkipSet], Sequence[SkipSet]]
"""Integer weights of an attention and an MLP sublayer, the largest weight to skip, and a set to skip besides -> the
best set of each weight on the newest tokens of the traffic."""
T = TypeVar("T")
MAX_LENGTH = 10
CONFIRM, LEAD = 6, 0.03
"""Windows over which a challenger must lead together, and by what share of the incumbent's tokens per time."""
KEPT = 0.25
"""Share of the candidates that goes on to the next window."""
BATCH_SECONDS = 0.8
FIRST = 8
"""Largest weight, and most candidates, before it is known what takes how long."""


class KnapSpec(SearchingSelection):
    """One set for all requests: the paper's search again and again, by the times of the batch and context of then.

    The sets of a search fit its window too well, and the best of many noisy scores is luck. So candidates are scored on
    the following windows, where ever fewer are left, by the tokens per time that their matchness allows; the last one
    replaces the incumbent if it leads over `CONFIRM` windows that had no part in its choice.

    Where there is no time for a search up to half of the model, it goes on from parts of the incumbent and from evenly
    spread sets of random size in turns.

    Args:
        n_layers, model: of the sets.
        evaluate: matchness over the newest `WINDOW` tokens of the traffic; one batched forward.
        propose: the search.
        pass_times: of steps as they are now; None while they are not known.
        clock: gives seconds; tests pass their own.
    """

    def __init__(
        self,
        n_layers: int,
        evaluate: Evaluate,
        propose: Propose,
        pass_times: Callable[[], PassTimes | None],
        model: str = "",
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.evaluate, self.propose, self.pass_times, self.clock = evaluate, propose, pass_times, clock
        self.incumbent = self._empty = SkipSet.empty(n_layers, model)
        self.matchness, self.candidates = 1.0, 0
        self._searches = 0
        self._space = BitSearch(n_layers, model)
        self._random = np.random.default_rng(0)
        self._trial: list[SkipSet] = []
        self._hits, self._windows = np.zeros(0), 0
        # Of a search per weight, and of scoring per set.
        self._seconds = {"search": 0.0, "score": 0.0}

    @property
    def searching(self) -> bool:
        """The traffic and what steps take change all the time."""
        return True

    @property
    def batch_seconds(self) -> float:
        if self._trial:
            return (len(self._trial) + 1) * self._seconds["score"]
        return BATCH_SECONDS if self._seconds["search"] else 0.0

    def sets(self) -> dict[str, SkipSet]:
        return {"knapspec": self.incumbent}

    def max_lengths(self, contexts: Counts) -> Counts | None:
        """Before a set was found, nothing is drafted."""
        return None if self.incumbent else np.zeros(len(contexts), np.int32)

    def step(self, seconds: float, max_batches: int = 1) -> bool:
        """Search, or score, once. What it takes is known and bounded from the second time on."""
        times, before = self.pass_times(), self.incumbent
        if times is None:
            return False
        if self._trial:
            with_incumbent = [self.incumbent, *self._trial]
            matchness = self._timed("score", len(with_incumbent), lambda: self.evaluate(with_incumbent))
            self._judge(np.asarray(matchness, np.float64), times)
        else:
            weights = integer_weights(times.attention, times.mlp)
            half = self.incumbent.n_layers * sum(weights) // 2
            most = max(1, min(half, self._most("search")))
            self._searches += 1
            base = self._empty if most == half else self._base()
            most = max(1, min(most, half - len(base.attention) * weights[0] - len(base.mlp) * weights[1]))
            found = self._timed("search", most, lambda: self.propose(weights, most, base))
            found = [skip for skip in found if skip and skip != self.incumbent]
            scored = min(len(found), max(1, self._most("score")))
            self.candidates += scored
            # Of all sizes, where there is no time for all of them.
            self._trial = [found[i] for i in np.linspace(0, len(found) - 1, scored).round().astype(int)]
            self._start()
        return self.incumbent != before

    def _base(self) -> SkipSet:
        """What a search that cannot reach everything skips besides."""
        if self.incumbent and self._searches % 2 == 0:
            kept = self._random.choice(
                self.incumbent.sublayers, self._random.integers(1, len(self.incumbent) + 1), False
            )
            return SkipSet.of_sublayers(kept, self.incumbent.n_layers, self.incumbent.model)
        self._space.resize(int(self._random.integers(1, self.incumbent.n_layers + 1)))
        return self._space.uniform()

    def _start(self) -> None:
        self._hits, self._windows = np.zeros(len(self._trial) + 1), 0

    def _judge(self, matchness: NDArray[np.float64], times: PassTimes) -> None:
        """Drop candidates by what all windows say of them; the last one becomes the incumbent or is dropped, too."""
        self._hits += matchness * WINDOW
        self._windows += 1
        acceptance = (self._hits + 0.5) / (self._windows * WINDOW + 1)
        pairs = zip([self.incumbent, *self._trial], acceptance, strict=True)
        rates = np.array([rate(skip, a, times) for skip, a in pairs])
        self.matchness = float(acceptance[0])
        leads = rates[1:] / rates[0] - 1.0
        if len(leads) > 1:
            best = np.argsort(-leads, kind="stable")[: int(np.ceil(KEPT * len(leads)))]
            self._trial = [self._trial[i] for i in sorted(best)] if leads.max() > 0 else []
            self._hits = self._hits[[0, *(1 + np.sort(best))]]
            if len(self._trial) <= 1:
                self._start()
        elif self._windows == CONFIRM or leads[0] <= 0:
            if leads[0] > LEAD and self._windows == CONFIRM:
                self.incumbent, self.matchness = self._trial[0], float(acceptance[1])
            self._trial = []

    def _most(self, kind: str) -> int:
        """How many weights or sets fit into `BATCH_SECONDS`."""
        return int(BATCH_SECONDS / self._seconds[kind]) if self._seconds[kind] else FIRST

    def _timed(self, kind: str, count: int, work: Callable[[], T]) -> T:
        started = self.clock()
        result = work()
        per_set, known = (self.clock() - started) / count, self._seconds[kind]
        self._seconds[kind] += (per_set - known) * (0.3 if known else 1.0)
        return result


def rate(skip: SkipSet, acceptance: float, times: PassTimes) -> float:
    """Tokens per second of a request with drafts of the best length; of the empty set, without drafts."""
    if not skip:
        return 1.0 / times.verify(1)
    draft = times.draft(skip)
    return max(tokens_per_time(acceptance, draft, times.verify, length) for length in range(1, MAX_LENGTH + 1))
