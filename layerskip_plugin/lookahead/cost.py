"""Draft while one more token is expected to pay for itself; draft nothing where no length does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from freedraft.cost.acceptance import PASS_KINDS, Acceptance
from freedraft.cost.probes import ProbeSchedule
from freedraft.draft_model import Recipe
from freedraft.hybrid.choice import DraftPassEstimate, RestOfBatch
from layerskip_plugin.lookahead.base import ALONE, Flags, Floats, Ints, Lookahead, Places, RoundLog
from layerskip_plugin.lookahead.rates import BinnedRate

BINS = 16
MAX_DRAFT_LEN = 64
MAX_KINDS = 16
MEMORY = 64.0
"""Rounds of a request after which an old one counts 1/e."""
PRIOR_WEIGHT = 6.0
FIRST_PROBE, RAREST_PROBE = 128, 512
"""Steps after which drafting is tried although no length seems to pay, at first and at most."""
DECISION_STEPS = 4
"""Steps for which it stays decided which skip sets draft, as long as as many requests have each."""
ON_MARGIN = 1.02
"""How much better than no drafting it must look to be switched on again."""


class Costs(Protocol):
    """What steps and draft passes take at present, and what is accepted: `Auto` measures both."""

    acceptance: Acceptance

    def step_seconds(self, batch: int, query_tokens: ArrayLike) -> NDArray[np.float64]:
        """Seconds of a step of the whole model, by query tokens over the batch."""

    def pass_seconds(self, recipe: Recipe, batch: ArrayLike) -> NDArray[np.float64]:
        """Seconds of a draft pass, by number of requests."""


def kinds_of(sets: Places) -> NDArray[np.uint8]:
    """uint8 [R]: what `DraftBatch.kinds` says of nodes that these skip sets drafted."""
    return (PASS_KINDS + np.minimum(sets, MAX_KINDS - 1)).astype(np.uint8)


class _Record:
    """What drafting with one skip set has brought.

    Attributes:
        reached, accepted: float64 [MAX_DRAFT_LEN], per place in the draft the share of rounds in which a token was
            drafted there, and in which one was accepted there.
        next_given: the chance that a further token is accepted, by the confidence in the one before it.
    """

    def __init__(self, prior: float) -> None:
        places = np.arange(MAX_DRAFT_LEN)
        self.reached, self.accepted = prior**places, prior ** (places + 1)
        self.weight = PRIOR_WEIGHT
        # Pooled: bins behind which nothing was drafted yet count as like the others. At a fixed prior that does not pay
        # for a pass nothing would ever be drafted behind them.
        self.next_given = BinnedRate(np.full(BINS, prior), PRIOR_WEIGHT, pooled=True)

    def update(self, drafted: Ints, accepted: Ints) -> None:
        """int32 [R] tokens drafted and accepted, of R rounds."""
        places, new = np.arange(MAX_DRAFT_LEN), len(drafted)
        self.weight = min(self.weight * np.exp(-new / MEMORY), MEMORY) + new
        self.reached += ((drafted[:, None] > places).mean(0) - self.reached) * (new / self.weight)
        self.accepted += ((accepted[:, None] > places).mean(0) - self.accepted) * (new / self.weight)


class Cost(Lookahead):
    """Maximises tokens per second under measured costs, over all requests of a step and all their skip sets together.

    A step of B requests brings N = B + (accepted tokens) in D = (draft passes of every set) + (verifying step) seconds.
    The best long-run ratio N / D is reached by going on exactly while the expected gain of more tokens exceeds `rate`
    times their price, where `rate` is that best ratio (Dinkelbach). It is estimated from what rounds brought so far,
    and is never below that of no drafting.

    After each token: the chance s that a request's draft is right so far is the product of P(accepted | confidence),
    the chance of the next one is P(next accepted | confidence); both are learnt. For the k requests with the best
    chances and m more tokens each, the gain is the sum over them of s * next * (1 + a + ... + a^(m-1)), with a the mean
    chance of their set; the price is m draft passes of each set among them and k * m more query tokens in the step. The
    k with the best surplus over all (k, m) go on, if it is positive.

    Args:
        costs: of this model on this machine.
        recipes: of the skip sets, in the order of their places.
        prior: rate of acceptance believed at first.
        horizon: the largest m.
    """

    needs_top = 1

    def __init__(self, costs: Costs, recipes: Sequence[Recipe], prior: float = 0.8, horizon: int = 8) -> None:
        if not 0 < prior < 1:
            raise ValueError(f"lookahead: prior must lie between 0 and 1, not {prior}")
        self.costs, self.recipes, self.prior, self.horizon = costs, list(recipes), prior, horizon
        self.records = [_Record(prior) for _ in self.recipes]
        self.log = RoundLog(1)
        self.on = True
        self.rate = 0.0
        self._probes = ProbeSchedule(FIRST_PROBE, RAREST_PROBE)
        self._probed = -1
        self._decision: tuple[bytes, Flags, int] = b"", np.zeros(0, np.bool_), 0

    def replace_recipe(self, place: int, recipe: Recipe) -> None:
        self.recipes[place], self.records[place] = recipe, _Record(self.prior)

    # -- before a round ------------------------------------------------------------------------------------------------

    def estimate(self, sets: Places, sizes: NDArray[np.int64], max_draft_len: int) -> DraftPassEstimate:
        """What a round is expected to bring and to take; see `DraftPassEstimate`.

        Args:
            sets: intp [R], place of each request's skip set; sizes: int64 [K], numbers of first requests.
        """
        numbers = np.arange(len(self.recipes))[:, None]
        return self._expected(sizes, (sets == numbers).cumsum(1)[:, sizes - 1], max_draft_len)

    def rates(self, counts: NDArray[np.int64], batch: int, max_draft_len: int = MAX_DRAFT_LEN) -> NDArray[np.float64]:
        """float64 [M + 1]: expected tokens per second of a step, by the most tokens a draft may have; first without
        drafts.

        Args:
            counts: int64 [S], requests that draft, by skip set; batch: all requests of the step.
        """
        expected = self._expected(np.array([counts.sum()]), counts[:, None], max_draft_len)
        seconds = expected.seconds[0] + self.costs.step_seconds(batch, batch + expected.tokens[0])
        baseline = batch / float(self.costs.step_seconds(batch, batch))
        return np.concatenate([[baseline], (batch + expected.gain[0]) / seconds])

    def _expected(self, sizes: NDArray[np.int64], counts: NDArray[np.int64], max_len: int) -> DraftPassEstimate:
        """counts: int64 [S, K], requests of each set that take part."""
        max_len = min(max_len, MAX_DRAFT_LEN)
        gain, tokens, seconds = np.zeros((3, len(sizes), max_len))
        for recipe, record, n in zip(self.recipes, self.records, counts[:, :, None], strict=True):
            if n.any():
                reached = record.reached[:max_len]
                any_left = 1 - (1 - np.minimum(reached, 1)) ** n
                rows = n * reached / np.maximum(any_left, 1e-9)
                seconds += np.cumsum(any_left * self.costs.pass_seconds(recipe, np.maximum(rows, 1)), 1)
                gain += n * np.cumsum(record.accepted[:max_len])
                tokens += n * np.cumsum(reached)
        return DraftPassEstimate(sizes, gain, tokens, seconds)

    def should_draft(self, sets: Places) -> Flags:
        """The requests of the skip sets that together beat no drafting by most; where none do, those of one set now and
        then, each set in its turn, to look again at the least price."""
        if not len(sets):
            return np.zeros(0, np.bool_)
        counts = np.bincount(sets, minlength=len(self.recipes))
        key, chosen, left = self._decision
        if left == 0 or key != counts.tobytes():
            chosen, left = self._sets_that_pay(counts), DECISION_STEPS
        self._decision = counts.tobytes(), chosen, left - 1
        self.on = bool(chosen.any())
        if self.on:
            self._probes.reset()
            return chosen[sets]
        if not self._probes.due():
            return np.zeros(len(sets), np.bool_)
        present = np.flatnonzero(counts)
        self._probed += 1
        return sets == present[self._probed % len(present)]

    def _sets_that_pay(self, counts: NDArray[np.int64]) -> Flags:
        """bool [S]: which skip sets are to draft, for so many requests of each."""
        batch, numbers = int(counts.sum()), np.arange(len(counts))
        present = np.flatnonzero(counts)
        alone = {s: float(self.rates(np.where(numbers == s, counts, 0), batch)[1:].max()) for s in present.tolist()}
        baseline = batch / float(self.costs.step_seconds(batch, batch))
        chosen, best = np.zeros(len(counts), np.bool_), baseline * (1.0 if self.on else ON_MARGIN)
        tried = chosen.copy()
        for s in sorted(alone, key=lambda s: -alone[s]):
            tried[s] = True
            rate = alone[s] if tried.sum() == 1 else float(self.rates(np.where(tried, counts, 0), batch)[1:].max())
            if rate > best:
                chosen, best = tried.copy(), rate
        return chosen

    # -- a round -------------------------------------------------------------------------------------------------------

    def begin(self, request_ids: Sequence[str], sets: Places, max_draft_len: int, rest: RestOfBatch = ALONE) -> None:
        super().begin(request_ids, sets, min(max_draft_len, MAX_DRAFT_LEN), rest)
        self.log.begin(request_ids, self.max_draft_len)
        batch = len(request_ids)
        if not batch:
            return
        counts = np.bincount(sets, minlength=len(self.recipes))
        self.rate = float(self.rates(counts, batch + rest.requests).max()) if rest.rate is None else rest.rate
        self.sets, self.kinds = np.asarray(sets), kinds_of(sets)
        self.survival = np.ones(batch)
        self.tokens = batch
        # What the decisions of this round look up: prices by number of requests and by number of query tokens.
        self.pass_price = {s: np.concatenate([[0.0], self.costs.pass_seconds(self.recipes[s], np.arange(1, n + 1))])
                           for s, n in enumerate(counts.tolist()) if n}  # fmt: skip
        query_tokens = np.maximum(np.arange(batch * (self.max_draft_len + 1) + 1), batch)
        self.step_price = self.costs.step_seconds(batch + rest.requests, rest.query_tokens + query_tokens)
        self.next = np.stack([record.next_given.rates for record in self.records])
        chances = np.array([record.next_given.mean for record in self.records])
        self.series = np.cumsum(chances[:, None] ** np.arange(self.horizon), 1)

    def should_continue(self, position: int, rows: Ints, top: Floats, entropy: Floats | None) -> Flags:
        more = np.zeros(len(rows), np.bool_)
        if position < self.max_draft_len:
            self.log.put(position, rows, top[:, :1])
        left = self.max_draft_len - position - 1
        if left < 1 or not len(rows):
            return more
        confidence, sets = top[:, 0], self.sets[rows]
        self.tokens += len(rows)
        self.survival[rows] *= self.costs.acceptance.given_parent(confidence, self.kinds[rows], position + 1)
        chance = self.survival[rows] * self.next[sets, to_bins(confidence)]
        order = np.argsort(-chance, kind="stable")
        passes = sum(price[np.cumsum(sets[order] == s)] for s, price in self.pass_price.items())
        k = np.arange(1, len(rows) + 1)[:, None]
        m = np.arange(1, min(left, self.horizon) + 1)
        gain = np.cumsum(chance[order, None] * self.series[sets[order]][:, m - 1], 0)
        price = m * np.asarray(passes)[:, None] + self.step_price[self.tokens + k * m] - self.step_price[self.tokens]
        surplus = (gain - self.rate * price).max(1)
        best = int(np.argmax(surplus))
        if surplus[best] > 0:
            more[order[: best + 1]] = True
        return more

    def record_acceptance(self, request_ids: Sequence[str], drafted: Ints, accepted: Ints, path: Ints) -> None:
        features, position, good, place = self.log.verified(request_ids, drafted, accepted)
        bins = to_bins(features[:, 0])
        pairs = np.flatnonzero((place[1:] == place[:-1]) & (position[1:] == position[:-1] + 1))
        known = np.array([self.log.row.get(request, -1) for request in request_ids], np.intp)
        sets = np.where(known >= 0, self.sets[known], -1) if len(self.log.row) else np.full(len(known), -1)
        for number, record in enumerate(self.records):
            mine = pairs[sets[place[pairs]] == number]
            record.next_given.add(bins[mine], good[mine + 1])
            rounds = (sets == number) & (drafted > 0)
            if rounds.any():
                record.update(drafted[rounds], path[rounds])


def to_bins(probability: Floats) -> NDArray[np.intp]:
    """Which of the `BINS` equal parts of [0, 1] each probability lies in."""
    return np.clip((probability * BINS).astype(np.intp), 0, BINS - 1)
