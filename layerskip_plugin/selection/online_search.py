"""One skip set for all requests, searched while serving: SWIFT (Xia et al. 2025) and KnapSpec (arXiv 2602.20217)."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from layerskip_plugin.knapsack_search import integer_weights
from layerskip_plugin.pass_times import PassTimes
from layerskip_plugin.selection.base import Counts, Evaluate, Selection
from layerskip_plugin.selection.bit_search import BitSearch
from layerskip_plugin.skip_set import SkipSet

Clock = Callable[[], float]
Propose = Callable[[tuple[int, int], int, SkipSet], Sequence[SkipSet]]
"""Integer weights of an attention and an MLP sublayer, the largest weight to skip, and a set to extend -> the best set
of each weight on the newest tokens of the traffic."""
# Tokens on which a batch of sets is scored.
WINDOW = 32
# SWIFT: a Gaussian process proposes every `BETA`-th candidate; candidates of a batch beside the incumbent.
BETA, MAX_CANDIDATES = 25, 8
# SWIFT: fall of live acceptance below that at the end of a search that starts the next one.
DROP = 0.1
# SWIFT: bounds of the best set's matchness outside of which the next search skips a notch fewer or more sublayers.
LOW, HIGH, NOTCH = 0.6, 0.92, 0.05
# KnapSpec: share of the candidates that goes on to the next window.
KEPT = 0.25
# KnapSpec: seconds of a search or a scoring, and the largest weight or number of sets before their times are known.
BATCH_SECONDS, FIRST = 0.8, 8


class OnlineSearch(Selection):
    """Searches on the newest tokens of the traffic, in steps that fit the time they are given.

    Every batch scores the incumbent and candidates on the same window. The best of many noisy scores alone would be
    luck, so a challenger replaces the incumbent only if it leads by `min_lead` on average over `confirm` windows that
    had no part in its choice; it is dropped as soon as it does not lead.

    Args:
        evaluate: matchness over the newest `WINDOW` tokens of the traffic; one batched forward.
        clock: gives seconds.

    Attributes:
        incumbent: the present set; matchness: its recent mean.
        candidates: sets tried.
    """

    searches = True
    name: str
    confirm: int
    min_lead: float

    def __init__(self, n_layers: int, evaluate: Evaluate, model: str, clock: Clock) -> None:
        self.evaluate, self.clock = evaluate, clock
        self.incumbent = SkipSet.empty(n_layers, model)
        self.matchness, self.candidates = 0.0, 0
        self.seconds = {"search": 0.0, "score": 0.0}  # of a proposal (per weight), and of a set scored

    def sets(self) -> dict[str, SkipSet]:
        return {self.name: self.incumbent}

    def choose(self, request_ids: Sequence[str], contexts: Counts) -> list[SkipSet]:
        return [self.incumbent] * len(request_ids)

    @property
    def searching(self) -> bool:
        """Whether `step` has anything to do."""
        return True

    @property
    @abstractmethod
    def batch_seconds(self) -> float:
        """Expected seconds of the next step; 0 before the first one."""

    @abstractmethod
    def step(self, seconds: float) -> bool:
        """Propose or score one batch of candidates if it fits into the time; True if the incumbent has changed."""

    def _verdict(self, lead: float, windows: int) -> bool | None:
        """Whether a challenger of this mean lead replaces the incumbent; None while that is open."""
        if lead <= 0:
            return False
        return lead >= self.min_lead if windows == self.confirm else None

    def _took(self, kind: str, started: float, count: int) -> None:
        each, mean = (self.clock() - started) / count, self.seconds[kind]
        self.seconds[kind] += (each - mean) * (0.3 if mean else 1.0)


class Swift(OnlineSearch):
    """SWIFT: sets of one size, drawn at random and now and then by Bayesian optimisation.

    The search ends after `patience` candidates without a better one; then the ratio moves a notch if matchness asks for
    it, and the set with it. It begins again when live acceptance falls. `ratio`: share of the sublayers skipped at
    first; `protected`: those that never are."""

    name, confirm, min_lead = "swift", 3, 0.01

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
        clock: Clock = time.perf_counter,
    ) -> None:
        super().__init__(n_layers, evaluate, model, clock)
        self.beta, self.patience = beta, patience
        self.space = BitSearch(n_layers, model, protected, seed=seed)
        self.max_ratio = len(self.space.skippable) / (2 * n_layers)
        self.ratio, self.last_move = min(ratio, self.max_ratio), 0
        self.acceptance = self.trials = self.acceptance_at_end = 0.0
        self.warm = False  # the first batch takes longer than any other
        self._restart()

    @property
    def searching(self) -> bool:
        return self.idle < self.patience

    @property
    def batch_seconds(self) -> float:
        return (MAX_CANDIDATES + 1) * self.seconds["score"] + self.seconds["search"]

    def step(self, seconds: float) -> bool:
        """The first two batches always run: before, it is not known what they take."""
        before = self.incumbent
        if self.searching and (count := self._batch_size(seconds)) >= 1:
            self._score(count)
        if not self.searching and not self.settled:
            self._settle()
        return self.incumbent != before

    def record_acceptance(
        self, request_ids: Sequence[str], drafted: Counts, accepted: Counts, skip_set: SkipSet
    ) -> None:
        verified = float(np.minimum(drafted, accepted + 1).sum())
        if not verified:
            return
        # Acceptance over about the newest 200 verified tokens.
        self.trials = min(self.trials + verified, 200.0)
        self.acceptance += (float(accepted.sum()) / verified - self.acceptance) * min(1.0, verified / self.trials)
        if self.searching or self.trials < 100:
            return
        if not self.acceptance_at_end:
            self.acceptance_at_end = self.acceptance
        elif self.acceptance < self.acceptance_at_end - DROP:
            self.last_move = 0
            self._restart()

    def _restart(self) -> None:
        """Search anew at the present ratio, from the incumbent with sublayers added or removed to that size."""
        size = max(1, min(len(self.space.skippable), round(self.ratio * 2 * self.space.n_layers)))
        self.space.resize(size)
        if len(self.incumbent) != size:
            self._use(self.space.resized(self.incumbent) if self.incumbent else self.space.uniform())
        self.challenger: SkipSet | None = None
        self.matchness = self.acceptance_at_end = self.lead = 0.0
        self.candidates = self.idle = self.windows = 0
        self.settled = False

    def _use(self, skip: SkipSet) -> None:
        self.incumbent = skip
        self.acceptance, self.trials = 0.0, 0.0  # live acceptance was another set's

    def _batch_size(self, seconds: float) -> int:
        if not self.seconds["score"]:
            return int(not self.warm or seconds > 0)
        in_time = int((seconds - self.seconds["search"]) / self.seconds["score"]) - 1
        return min(MAX_CANDIDATES, self.patience, in_time)

    def _score(self, count: int) -> None:
        """Score the incumbent and `count` candidates, the challenger among them."""
        first, started = not self.space.values, self.clock()
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
        self._judge(batch[1:], scores[1:] - scores[0])
        if self.warm:
            self._took("score", started, len(batch))
        self.warm = True

    def _judge(self, candidates: list[SkipSet], leads: NDArray[np.float64]) -> None:
        """Make the challenger the incumbent once it has led long enough, or the best candidate the challenger."""
        if self.challenger is not None:
            self.lead, self.windows = self.lead + float(leads[0]), self.windows + 1
            won = self._verdict(self.lead / self.windows, self.windows)
            if won is None:
                return
            if won:
                self._use(self.challenger)
                self.idle, self.matchness = 0, self.matchness + self.lead / self.windows
            self.challenger = None
            # After a win: the others were measured against the old incumbent.
            candidates, leads = ([], leads) if won else (candidates[1:], leads[1:])
        if candidates and leads.max() > 0:
            self.challenger, self.lead, self.windows = candidates[int(np.argmax(leads))], 0.0, 0

    def _propose(self) -> SkipSet:
        if self.candidates % self.beta:
            return self.space.random()
        started = self.clock()
        skip = self.space.bayesian()
        # Paid once in `beta` candidates, but it must fit into the step that it falls in.
        self.seconds["search"] = self.clock() - started
        return skip

    def _settle(self) -> None:
        """End the search: keep the set, or search again with a neighbouring ratio."""
        self.settled = True
        move = 1 if self.matchness > HIGH else -1 if self.matchness < LOW else 0
        ratio = self.ratio + move * NOTCH
        # Never back to where it came from: it would swing between two ratios for ever.
        if move and move != -self.last_move and NOTCH / 2 < ratio < self.max_ratio:
            self.ratio, self.last_move = ratio, move
            self._restart()


class KnapSpec(OnlineSearch):
    """KnapSpec: sets of all sizes by the paper's search, chosen by tokens per time at the present batch and context.

    The sets of a search fit its window too well: they are scored on the following windows, where ever fewer are left,
    by the tokens per time that their matchness allows; the last one is the challenger. Where there is no time for a
    search up to half of the model, it extends parts of the incumbent and evenly spread sets of random size in turns.

    Args:
        propose: the search.
        pass_times: of steps as they are now; None while they are not known.
    """

    name, confirm, min_lead = "knapspec", 6, 0.03

    def __init__(
        self,
        n_layers: int,
        evaluate: Evaluate,
        propose: Propose,
        pass_times: Callable[[], PassTimes | None],
        model: str = "",
        clock: Clock = time.perf_counter,
    ) -> None:
        super().__init__(n_layers, evaluate, model, clock)
        self.propose, self.pass_times = propose, pass_times
        self._empty, self._space = self.incumbent, BitSearch(n_layers, model)
        self._searches, self._random = 0, np.random.default_rng(0)
        self._trial: list[SkipSet] = []
        self._hits, self._windows = np.zeros(0), 0

    @property
    def batch_seconds(self) -> float:
        if self._trial:
            return (len(self._trial) + 1) * self.seconds["score"]
        return BATCH_SECONDS if self.seconds["search"] else 0.0

    def max_lengths(self, contexts: Counts) -> Counts | None:
        """Before a set was found, nothing is drafted."""
        return None if self.incumbent else np.zeros(len(contexts), np.int32)

    def step(self, seconds: float) -> bool:
        """What it takes is known and bounded from the second time on, whatever `seconds` are."""
        times, before, started = self.pass_times(), self.incumbent, self.clock()
        if times is None:
            return False
        if self._trial:
            matchness = np.asarray(self.evaluate([self.incumbent, *self._trial]), np.float64)
            self._took("score", started, len(matchness))
            self._judge(matchness, times)
        else:
            self._search(integer_weights(times.attention, times.mlp), started)
        return self.incumbent != before

    def _search(self, weights: tuple[int, int], started: float) -> None:
        half = self.incumbent.n_layers * sum(weights) // 2
        most = max(1, min(half, self._affordable("search")))
        self._searches += 1
        base = self._empty if most == half else self._base()
        most = max(1, min(most, half - len(base.attention) * weights[0] - len(base.mlp) * weights[1]))
        found = [skip for skip in self.propose(weights, most, base) if skip and skip != self.incumbent]
        self._took("search", started, most)
        scored = min(len(found), max(1, self._affordable("score")))
        self.candidates += scored
        # Of all sizes, where there is no time for all of them.
        self._start([found[i] for i in np.linspace(0, len(found) - 1, scored).round().astype(int)])

    def _base(self) -> SkipSet:
        if self.incumbent and self._searches % 2 == 0:
            count = self._random.integers(1, len(self.incumbent) + 1)
            kept = self._random.choice(self.incumbent.sublayers, count, False)
            return SkipSet.of_sublayers(kept, self.incumbent.n_layers, self.incumbent.model)
        self._space.resize(int(self._random.integers(1, self.incumbent.n_layers + 1)))
        return self._space.uniform()

    def _start(self, trial: list[SkipSet]) -> None:
        self._trial, self._hits, self._windows = trial, np.zeros(len(trial) + 1), 0

    def _judge(self, matchness: NDArray[np.float64], times: PassTimes) -> None:
        """Drop candidates by what all windows say of them; the last one becomes the incumbent or is dropped, too."""
        self._hits += matchness * WINDOW
        self._windows += 1
        acceptance = (self._hits + 0.5) / (self._windows * WINDOW + 1)
        pairs = zip([self.incumbent, *self._trial], acceptance, strict=True)
        # The empty set stands for no drafting.
        rates = np.array([times.best(skip, a)[0] if skip else 1.0 / times.verify(1) for skip, a in pairs])
        self.matchness = float(acceptance[0])
        leads = rates[1:] / rates[0] - 1.0
        if len(leads) > 1:
            best = np.sort(np.argsort(-leads, kind="stable")[: int(np.ceil(KEPT * len(leads)))])
            self._trial = [self._trial[i] for i in best] if leads.max() > 0 else []
            self._hits = self._hits[[0, *(1 + best)]]
            if len(self._trial) <= 1:
                self._start(self._trial)
        elif (won := self._verdict(float(leads[0]), self._windows)) is not None:
            if won:
                self.incumbent, self.matchness = self._trial[0], float(acceptance[1])
            self._trial = []

    def _affordable(self, kind: str) -> int:
        return int(BATCH_SECONDS / self.seconds[kind]) if self.seconds[kind] else FIRST
