"""Searches while serving: SWIFT (Xia et al. 2025) and KnapSpec (arXiv 2602.20217)."""

import logging
import time
import warnings
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freedraft.cost.measured import Measured
from freedraft.step import Step
from layerskip_plugin.knapsack_search import integer_weights, search
from layerskip_plugin.pass_times import PassTimes, serving_times
from layerskip_plugin.selection.base import Counts, Selection
from layerskip_plugin.skip_set import SkipSet

logger = logging.getLogger("freedraft.layerskip")

MATCHNESS_RATE = 0.2  # weight of the newest window in the incumbent's matchness
MAX_SAVED = 1.0  # maximum of saved seconds of searching: no long search after a pause
# Seconds of a search or a scoring, and the largest weight or number of sets before their times are known.
BATCH_SECONDS, FIRST = 0.8, 8
SCORED_TOGETHER = 16  # candidates of SWIFT
SAMPLES, PARENTS = 200, 8  # random sets, and best sets whose neighbours are tried, of one Bayesian proposal
MAX_OBSERVATIONS = 256  # of the fit of the Gaussian process, which has cubic cost


class OnlineSearch(Selection):
    """Searches on the newest tokens of the traffic, in steps of less than a second, for a share of serving time.

    Candidates are scored together with the incumbent, on the same windows; the share `kept` of them, at least one,
    stays for the next window. The best of many noisy scores may be luck, so the last candidate replaces the incumbent
    only if it leads by `min_lead` over `confirm` further windows; it is dropped as soon as it does not lead.

    Attributes:
        share: of elapsed time that searching may take.
        window: tokens to score a batch of sets on (SWIFT's gamma).
        matchness: recent mean of the incumbent, the present set.
        candidates: sets tried; idle: those since the incumbent last changed.
    """

    optimized = 0  # sets are replaced soon
    share, window = 0.01, 32
    clock = staticmethod(time.perf_counter)
    name: str
    kept: float
    confirm: int
    min_lead: float

    scorer: Any  # see `DraftModel.scorer`
    measured: Measured | None
    _present: SkipSet
    _batch: int

    def __init__(self, incumbent: SkipSet) -> None:
        super().__init__({self.name: incumbent})
        self.matchness, self.candidates, self.idle = 0.0, 0, 0
        self.seconds = {"search": 0.0, "score": 0.0}  # per weight of KnapSpec's search, and per scored set
        self._saved, self._updated = 0.0, self.clock()
        self._step_seconds = 0.0  # of the newest step, expected for the next one
        self._use([])

    def prepare(self, scorer: Any, measured: Measured | None) -> None:
        self.scorer, self.measured = scorer, measured

    @property
    def incumbent(self) -> SkipSet:
        return self.sets[self.name]

    @property
    def searching(self) -> bool:
        return True

    def search(self, step: Step, present: SkipSet) -> SkipSet | None:
        """Continue if there is time and text for it; return the new incumbent if it has changed. present: the recipe of
        the newest draft passes."""
        now = self.clock()
        self._saved = min(MAX_SAVED, self._saved + self.share * (now - self._updated))
        self._updated = now
        if not self.searching or self._saved < min(self._step_seconds, 0.9 * MAX_SAVED):
            return None
        if not self.scorer.observe(step):
            return None
        self._present, self._batch = present, max(step.batch_size, 1)
        started = self.clock()
        changed = self.step()
        self._step_seconds = self.clock() - started
        self._saved -= self._step_seconds
        if not changed:
            return None
        logger.info(
            "freedraft: better skip set found (%d tried): skips %d of %d sublayers, agrees on %.0f %% of tokens",
            self.candidates, len(self.incumbent), 2 * self.incumbent.n_layers, 100 * self.matchness,
        )  # fmt: skip
        return self.incumbent

    @abstractmethod
    def _propose(self) -> None: ...

    @abstractmethod
    def _values(self, sets: Sequence[SkipSet], acceptance: NDArray[np.float64]) -> NDArray[np.float64]:
        """float64 [J]: the positive objective, for sets with this acceptance."""

    def step(self) -> bool:
        """Propose or score candidates; whether the incumbent has changed."""
        before = self.incumbent
        if self._trial:
            self._score()
        else:
            self._propose()
        return self.incumbent != before

    def _use(self, trial: list[SkipSet]) -> None:
        self._trial, self._hits, self._windows = trial, np.zeros(1), 0

    def _score(self) -> None:
        started, sets = self.clock(), [self.incumbent, *self._trial]
        matchness = self.scorer(sets)
        self._took("score", started, len(sets))
        self.matchness += (matchness[0] - self.matchness) * (MATCHNESS_RATE if self.matchness else 1.0)
        self._hits = self._hits + matchness * self.window
        self._windows += 1
        acceptance = (self._hits + 0.5) / (self._windows * self.window + 1)
        values = self._values(sets, acceptance)
        leads = values[1:] / values[0] - 1.0
        if leads.max() <= 0:
            self._use([])
        elif len(leads) > 1:
            best = np.sort(np.argsort(-leads, kind="stable")[: max(1, int(np.ceil(self.kept * len(leads))))])
            self._trial, self._hits = [self._trial[i] for i in best], self._hits[[0, *(1 + best)]]
            if len(best) == 1:
                self._use(self._trial)
        elif self._windows == self.confirm:
            if leads[0] >= self.min_lead:
                self.sets = {self.name: self._trial[0]}
                self.matchness, self.idle = float(acceptance[1]), 0
            self._use([])

    def _took(self, kind: str, started: float, count: int) -> None:
        each, mean = (self.clock() - started) / count, self.seconds[kind]
        self.seconds[kind] += (each - mean) * (0.3 if mean else 1.0)

    def _affordable(self, kind: str) -> int:
        return int(BATCH_SECONDS / self.seconds[kind]) if self.seconds[kind] else FIRST


def evenly_spread(sublayers: NDArray[np.intp], count: int) -> NDArray[np.intp]:
    return sublayers[((np.arange(count) + 0.5) * len(sublayers) / max(1, count)).astype(np.intp)]


class BitSearch:
    """Proposes sets that skip `size` sublayers, never protected ones, and learns from their values. Raises ValueError
    if `size` exceeds the number of all others."""

    def __init__(self, n_layers: int, size: int, model: str = "", protected: Iterable[int] = ()) -> None:
        self.n_layers, self.model, self.size = n_layers, model, size
        self.skippable = np.array(sorted(set(range(2 * n_layers)) - set(protected)), np.intp)
        if not 0 <= size <= len(self.skippable):
            raise ValueError(f"{size} sublayers cannot be skipped: {len(self.skippable)} of {2 * n_layers} may be")
        self.rng = np.random.default_rng(0)
        self.values: dict[SkipSet, float] = {}
        self.kernel: Any = None
        self.fitted = 0

    def uniform(self) -> SkipSet:
        return self._skip(evenly_spread(self.skippable, self.size))

    def random(self) -> SkipSet:
        return self._skip(self.skippable[self._draw(1)[0]])

    def bayesian(self) -> SkipSet:
        """The new set of largest upper confidence bound, among random ones and neighbours of the best observed."""
        if len(self.values) < 2:
            return self.random()
        best = self._points(sorted(self.values, key=self.values.__getitem__)[-PARENTS:]) > 0
        near = self._neighbours(best[np.arange(SAMPLES) % len(best)])
        proposals = np.unique(np.concatenate([self._draw(SAMPLES), near, self._neighbours(near)]), axis=0)
        mean, deviation = self._process().predict(proposals.astype(np.float64), return_std=True)
        for i in np.argsort(-(mean + deviation), kind="stable"):
            skip = self._skip(self.skippable[proposals[i]])
            if skip not in self.values:
                return skip
        return self.random()

    def register(self, skips: Sequence[SkipSet], values: Sequence[float] | NDArray[np.float64]) -> None:
        """Add the values of these sets; for a set measured again, the mean of both values."""
        for skip, value in zip(skips, values, strict=True):
            old = self.values.pop(skip, None)
            self.values[skip] = float(value) if old is None else (old + float(value)) / 2

    def _draw(self, count: int) -> NDArray[np.bool_]:
        return self.rng.random((count, len(self.skippable))).argsort(1).argsort(1) < self.size

    def _neighbours(self, sets: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """bool[N, skippable]: each set with one sublayer in place of another."""
        out, rows, draws = sets.copy(), np.arange(len(sets)), self.rng.random(sets.shape)
        if 0 < self.size < sets.shape[1]:
            out[rows, np.where(sets, draws, -1.0).argmax(1)] = False
            out[rows, np.where(sets, -1.0, draws).argmax(1)] = True
        return out

    def _process(self) -> Any:
        """The Gaussian process of the newest observations; its length scale is refitted when they have grown by
        half."""
        from sklearn.gaussian_process import GaussianProcessRegressor
        from sklearn.gaussian_process.kernels import Matern, WhiteKernel

        observations = list(self.values.items())[-MAX_OBSERVATIONS:]
        fit = self.kernel is None or len(self.values) >= 1.5 * self.fitted
        kernel = self.kernel or Matern(3.0, (0.5, 30.0), nu=2.5) + WhiteKernel(0.1, (1e-4, 1.0))
        process = GaussianProcessRegressor(kernel, normalize_y=True, optimizer="fmin_l_bfgs_b" if fit else None)
        with warnings.catch_warnings():
            # A length scale at its bound is a valid fit.
            warnings.simplefilter("ignore")
            process.fit(self._points([skip for skip, _ in observations]), [value for _, value in observations])
        if fit:
            self.kernel, self.fitted = process.kernel_, len(self.values)
        return process

    def _points(self, skips: Sequence[SkipSet]) -> NDArray[np.float64]:
        return np.array([skip.bits for skip in skips], np.float64)[:, self.skippable]

    def _skip(self, sublayers: Iterable[int] | NDArray[np.intp]) -> SkipSet:
        return SkipSet.of_sublayers(sublayers, self.n_layers, self.model)


class Swift(OnlineSearch):
    """SWIFT: the set of a fixed size with the best matchness, by random draws and occasional Bayesian optimisation.

    Attributes:
        ratio: share of skipped sublayers. The paper's models of 7 to 70 billion weights skip .4 to .5.
        bayesian: every how many candidates one is proposed by a Gaussian process.
        most, patience, stop_score: the search ends after `most` candidates, after `patience` without a better one, or
            with a matchness above `stop_score`.
    """

    name, kept, confirm, min_lead = "swift", 0.0, 3, 0.01
    ratio, bayesian, most, patience, stop_score = 0.45, 25, 1000, 300, 0.95  # appendix B.2: r, beta, S

    def __init__(self, n_layers: int, model: str = "", ratio: float = ratio, protected: Iterable[int] = ()) -> None:
        self.space = BitSearch(n_layers, round(ratio * 2 * n_layers), model, protected)
        super().__init__(self.space.uniform())

    @property
    def searching(self) -> bool:
        return self.idle < self.patience and self.candidates < self.most and self.matchness <= self.stop_score

    def _propose(self) -> None:
        trial: list[SkipSet] = []
        left = min(SCORED_TOGETHER, self.most - self.candidates)
        for _ in range(max(1, min(left, self._affordable("score") - 1))):
            self.candidates += 1
            self.idle += 1
            skip = self.space.bayesian() if self.candidates % self.bayesian == 0 else self.space.random()
            if skip != self.incumbent and skip not in trial:
                trial.append(skip)
        self._use(trial)
        if trial:
            self._score()

    def _values(self, sets: Sequence[SkipSet], acceptance: NDArray[np.float64]) -> NDArray[np.float64]:
        self.space.register(sets, acceptance)
        return acceptance


class KnapSpec(OnlineSearch):
    """KnapSpec: sets of all sizes by the paper's search, chosen by tokens per time at the present batch and context.

    The sets of a search overfit its window, so they are scored on the following ones. If there is no time for a search
    up to half of the model, it extends parts of the incumbent and evenly spread sets of random size in turns.
    """

    name, kept, confirm, min_lead = "knapspec", 0.25, 6, 0.03

    def __init__(self, n_layers: int, model: str = "") -> None:
        self._empty = SkipSet.empty(n_layers, model)
        super().__init__(self._empty)
        self._times: PassTimes | None = None
        self._searches, self._random = 0, np.random.default_rng(0)

    def max_lengths(self, contexts: Counts) -> Counts | None:
        """No drafts before the first set."""
        return None if self.incumbent else np.zeros(len(contexts), np.int32)

    def step(self) -> bool:
        self._times = self.pass_times()
        return self._times is not None and super().step()

    def pass_times(self) -> PassTimes | None:
        """At the present batch and context; None while times are unknown."""
        return None if self.measured is None else serving_times(self.measured, self._present, self._batch)

    def sets_of_weights(self, weights: tuple[int, int], most: int, base: SkipSet) -> list[SkipSet]:
        """The best set of each skipped weight on the newest tokens of the traffic. weights: of an attention and an MLP
        sublayer; most: largest weight to skip; base: a set to extend."""
        run = partial(search, sublayers=2 * base.n_layers, weights=weights, max_weight=most, base=base.sublayers)
        return self.scorer.run_sublayers(run).sets(base.model)

    def _propose(self) -> None:
        assert self._times is not None
        started, weights = self.clock(), integer_weights(self._times.attention, self._times.mlp)
        half = self.incumbent.n_layers * sum(weights) // 2
        most = max(1, min(half, self._affordable("search")))
        self._searches += 1
        base = self._empty if most == half else self._base()
        most = max(1, min(most, half - len(base.attention) * weights[0] - len(base.mlp) * weights[1]))
        found = [skip for skip in self.sets_of_weights(weights, most, base) if skip and skip != self.incumbent]
        self._took("search", started, most)
        scored = min(len(found), max(1, self._affordable("score")))
        self.candidates += scored
        # A sample over all sizes, if there is no time for all.
        self._use([found[i] for i in np.linspace(0, len(found) - 1, scored).round().astype(int)])

    def _base(self) -> SkipSet:
        n_layers = self.incumbent.n_layers
        if self.incumbent and self._searches % 2 == 0:
            count = self._random.integers(1, len(self.incumbent) + 1)
            kept = self._random.choice(self.incumbent.sublayers, count, False)
        else:
            kept = evenly_spread(np.arange(2 * n_layers), int(self._random.integers(1, n_layers + 1)))
        return SkipSet.of_sublayers(kept, n_layers, self._empty.model)

    def _values(self, sets: Sequence[SkipSet], acceptance: NDArray[np.float64]) -> NDArray[np.float64]:
        """Tokens per time; the empty set means no drafting."""
        times = self._times
        assert times is not None
        pairs = zip(sets, acceptance.tolist(), strict=True)
        return np.array([times.best(skip, a)[0] if skip else 1.0 / times.verify(1) for skip, a in pairs])
