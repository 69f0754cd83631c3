"""Draft while one more token is expected to pay for itself; draft nothing where no length does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from freedraft.cost.acceptance import PASS_KINDS, Acceptance
from freedraft.draft_model import Recipe
from freedraft.hybrid.choice import DraftPassEstimate, RestOfBatch
from layerskip_plugin.lookahead.base import ALONE, NONE, Flags, Floats, Ints, Lookahead, Places, RoundLog
from layerskip_plugin.lookahead.recipe_record import MAX_DRAFT_LEN, RecipeRecord, to_bins
from layerskip_plugin.lookahead.trials import Trials
from layerskip_plugin.lookahead.windows import Windows

MAX_KINDS = 16
DECISION_STEPS, IDLE_STEPS = 4, 16
"""Steps for which it stays decided which recipes draft, as long as as many requests have each; where none does, until
a trial says something new."""
ON_MARGIN, STAY_MARGIN = 1.05, 1.02
"""How much better than no drafting it must look to be switched on again, and to stay on: of what is about as good, the
one whose times were measured too well looks better."""


class Costs(Protocol):
    """What steps and draft passes take at present, and what is accepted: `Auto` measures both."""

    acceptance: Acceptance

    @property
    def overrun(self) -> float:
        """By how much a step with draft passes takes longer than its parts, as a factor."""

    def step_seconds(self, batch: int, query_tokens: ArrayLike) -> NDArray[np.float64]:
        """Seconds of a step of the whole model, by query tokens over the batch."""

    def pass_seconds(self, recipe: Recipe, batch: ArrayLike) -> NDArray[np.float64]:
        """Seconds of a draft pass, by number of requests."""


def kinds_of(places: Places) -> NDArray[np.uint8]:
    """uint8 [R]: what `DraftBatch.kinds` says of nodes that the recipes at these places drafted."""
    return (PASS_KINDS + np.clip(places, 0, MAX_KINDS - 1)).astype(np.uint8)


class Cost(Lookahead):
    """Maximises tokens per second under measured costs, over all requests of a step and all their recipes together.

    A step of B requests brings N = B + (accepted tokens) in D = (draft passes of all recipes) + (verification) seconds.
    The best long-run ratio N / D is reached by going on exactly while the expected gain of more tokens exceeds `rate`
    times their price, where `rate` is that best ratio (Dinkelbach). It is estimated from what rounds brought so far,
    and is never below that of no drafting.

    After each token: the chance s that a request's draft is right so far is the product of P(accepted | confidence),
    the chance of the next one is P(next accepted | confidence); both are learnt. For the k requests with the best
    chances and m more tokens each, the gain is the sum over them of s * next * (1 + a + ... + a^(m-1)), with a the mean
    chance of their recipe; the price is m draft passes of each recipe among them and k * m more query tokens in the
    step. The k with the best surplus over all (k, m) go on, if it is positive. Passes that have run already cost
    nothing any more (`read`), and where several run before the first is looked at (`reads_ahead`), all of them are
    paid, whoever stops.

    Args:
        costs: of this model on this machine.
        recipes: skip sets with windows, in the order of their places: those of one skip set together, by window.
        windows: how many of them each skip set has; page_size: see `Windows`.
        prior: rate of acceptance believed at first.
        horizon: the largest m.
        widths: int32, ascending: numbers of nodes per request that can be verified, where they are the same for all;
            None where every request may have its own.
        longest: most tokens that a draft can have.

    Attributes:
        reads_ahead: whether a round's passes run as far as `expected_len` before `should_continue` is asked.
        read: int [R], positions of each request of the present round that were run so far.
        trials: rounds that draft although no length seems to pay.
        margin: by how much the last round was expected to beat a step without drafts, as a share.
    """

    needs_top = 1

    def __init__(
        self,
        costs: Costs,
        recipes: Sequence[Recipe],
        prior: float = 0.8,
        horizon: int = 8,
        windows: int = 1,
        widths: Sequence[int] | None = None,
        longest: int = MAX_DRAFT_LEN,
        page_size: int = 1,
    ) -> None:
        if not 0 < prior < 1:
            raise ValueError(f"lookahead: prior must lie between 0 and 1, not {prior}")
        self.costs, self.recipes, self.prior, self.horizon = costs, list(recipes), prior, horizon
        self.records = [RecipeRecord(prior) for _ in self.recipes]
        self.log = RoundLog(1)
        self.widths = None if widths is None else np.array(widths, np.int32)
        self.longest = min(longest, MAX_DRAFT_LEN)
        self.reads_ahead = False
        self.read = np.zeros(0, np.intp)
        self.on = True
        self.rate = self.margin = 0.0
        self._best_len = 1
        self.windows = Windows(self.recipes, windows, page_size)
        self.trials = Trials(self.windows)
        self._round = np.zeros(len(self.recipes), np.int64), 1  # its requests by recipe, and all of the step
        self._decision: tuple[bytes, Flags, int] = b"", np.zeros(0, np.bool_), 0
        self._chosen: tuple[bytes, Places, int] = b"", np.zeros(0, np.intp), 0

    def replace_recipe(self, place: int, recipe: Recipe) -> None:
        """What was learnt of the old one is forgotten, and the new one is tried at once."""
        self.recipes[place], self.records[place] = recipe, RecipeRecord(self.prior)
        self.windows.replace_recipe(place, recipe)
        self.trials.ask(place)
        self.costs.acceptance.forget(int(kinds_of(np.array([place]))[0]))
        self._decide_anew()

    def _decide_anew(self) -> None:
        self._decision, self._chosen = (b"", self._decision[1], 0), (b"", self._chosen[1], 0)

    # -- before a round ------------------------------------------------------------------------------------------------

    def estimate(self, places: Places, sizes: NDArray[np.int64], max_draft_len: int) -> DraftPassEstimate:
        """What a round is expected to bring and to take; see `DraftPassEstimate`.

        Args:
            places: intp [R], of each request's recipe; sizes: int64 [K], numbers of first requests.
        """
        numbers = np.arange(len(self.recipes))[:, None]
        counts = (places == numbers).cumsum(1)[:, sizes - 1]
        return self._expected(sizes, counts, max_draft_len)

    def rates(self, counts: NDArray[np.int64], batch: int) -> NDArray[np.float64]:
        """float64 [M + 1]: expected tokens per second of a step, by the most tokens a draft may have; first without
        drafts.

        Args:
            counts: int64 [S], requests that draft, by recipe; batch: all requests of the step.
        """
        expected = self._expected(np.array([counts.sum()]), counts[:, None], self.longest)
        seconds = expected.seconds[0] + self._verification(counts, batch, expected.tokens[0])
        baseline = batch / float(self.costs.step_seconds(batch, batch))
        return np.concatenate([[baseline], (batch + expected.gain[0]) / (self.costs.overrun * seconds)])

    def _verification(self, counts: NDArray[np.int64], batch: int, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """float64 [M]: expected seconds of the verifying step, by the most tokens a draft may have."""
        if self.widths is None:
            return self.costs.step_seconds(batch, batch + tokens)
        # The longest draft of the batch makes all requests as wide: what each place costs if anyone drafts there.
        seconds = self.costs.step_seconds(batch, batch * self._fitting(np.arange(2, len(tokens) + 2)))
        nobody = np.prod(
            [
                (1 - np.minimum(record.verified[: len(tokens)], 1)) ** n
                for record, n in zip(self.records, counts.tolist(), strict=True)
            ],
            0,
        )
        return seconds[0] + np.concatenate([[0.0], np.cumsum((1 - nobody[1:]) * np.diff(seconds))])

    def _could_pay(self) -> bool:
        """Whether the last round's requests would gain if all that is drafted for them were accepted."""
        counts, batch = self._round
        lengths, n = np.arange(1, self.longest + 1), counts.sum()
        passes = sum(float(self.costs.pass_seconds(self.recipes[i], counts[i])) for i in np.flatnonzero(counts))
        tokens = batch + n * lengths if self.widths is None else batch * self._fitting((1 + lengths).astype(np.int32))
        rates = (batch + n * lengths) / (lengths * passes + self.costs.step_seconds(batch, tokens))
        rates /= self.costs.overrun
        return bool(rates.max() > batch / float(self.costs.step_seconds(batch, batch)))

    def _fitting(self, nodes: Ints) -> Ints:
        """The numbers of nodes per request that are verified where drafts have so many."""
        assert self.widths is not None
        return self.widths[np.minimum(np.searchsorted(self.widths, nodes), len(self.widths) - 1)]

    def _expected(self, sizes: NDArray[np.int64], counts: NDArray[np.int64], max_len: int) -> DraftPassEstimate:
        """counts: int64 [S, K], requests of each recipe that take part."""
        max_len = min(max_len, self.longest)
        gain, tokens, seconds = np.zeros((3, len(sizes), max_len))
        for recipe, record, n in zip(self.recipes, self.records, counts[:, :, None], strict=True):
            if n.any():
                reached = record.reached[:max_len]
                any_left = 1 - (1 - np.minimum(reached, 1)) ** n
                if self.reads_ahead:
                    whole = (n > 0) * self.costs.pass_seconds(recipe, np.maximum(n, 1))
                    seconds += whole * np.arange(1, max_len + 1)
                else:
                    rows = n * reached / np.maximum(any_left, 1e-9)
                    seconds += np.cumsum(any_left * self.costs.pass_seconds(recipe, np.maximum(rows, 1)), 1)
                gain += n * np.cumsum(record.accepted[:max_len])
                tokens += n * np.cumsum(record.verified[:max_len])
        return DraftPassEstimate(sizes, gain, tokens, seconds, self.costs.overrun)

    def recipes_for(self, sets: Places, contexts: Ints) -> Places:
        """Of each request's skip set the window that pays best. NONE where a pass would do what the whole model does:
        nothing is skipped, and no window is shorter than the request."""
        if not self.windows.limit:
            return sets
        useful = self.windows.useful(sets * self.windows.per_set, contexts)
        kind_of = (sets << self.windows.per_set) | useful @ (1 << np.arange(self.windows.per_set))
        key, chosen, left = self._chosen
        if left == 0 or key != kind_of.tobytes():
            chosen, left = np.full(len(sets), NONE, np.intp), DECISION_STEPS if self.on else IDLE_STEPS
            kinds, first, counts = np.unique(kind_of, return_index=True, return_counts=True)
            for kind, i, count in zip(kinds.tolist(), first.tolist(), counts.tolist(), strict=True):
                places = sets[i] * self.windows.per_set + np.flatnonzero(useful[i])
                if len(places):
                    best = max(places, key=lambda place: self._rate_alone(place, count, len(sets)))
                    chosen[kind_of == kind] = best
        self._chosen = kind_of.tobytes(), chosen, left - 1
        return chosen

    def _rate_alone(self, place: int, count: int, batch: int) -> float:
        """Expected tokens per second if so many requests draft with this recipe, and no others."""
        return float(self.rates(np.where(np.arange(len(self.recipes)) == place, count, 0), batch)[1:].max())

    def should_draft(self, places: Places, others: int = 0, contexts: Ints | None = None) -> Places:
        """The requests of the recipes that together beat no drafting by most, now and then with another window; where
        none do, those of one recipe now and then, each in its turn, to look again at the least price."""
        counts = np.bincount(places[places != NONE], minlength=len(self.recipes))
        if not counts.any():
            return np.full(len(places), NONE)
        key, chosen, left = self._decision
        if left == 0 or key != counts.tobytes():
            chosen = self._recipes_that_pay(counts, len(places) + others)
            left = DECISION_STEPS if chosen.any() else IDLE_STEPS
        self._decision = counts.tobytes(), chosen, left - 1
        self.on = bool(chosen.any())
        if self.on:
            drafting = (places != NONE) & chosen[places]
        else:
            place = self.trials.next(counts, contexts)
            if place == NONE:
                return np.full(len(places), NONE)
            drafting = places == place
        return np.where(drafting, self.recipes_of_round(places, contexts, pays=self.on), NONE)

    def recipes_of_round(self, places: Places, contexts: Ints | None = None, *, pays: bool) -> Places:
        """intp [R]: what the requests of a round draft with: their recipes, now and then with another window.

        Args:
            places: intp [R], their recipes; contexts: int32 [R], their tokens; None: more than any window.
            pays: whether the round is expected to pay; else it is a trial.
        """
        self.on = pays
        recipes = self.windows.of_round(places, contexts, pays=pays, again=self.trials.wanted)
        self.trials.begin_round(pays=pays)
        return recipes

    def _recipes_that_pay(self, counts: NDArray[np.int64], batch: int) -> Flags:
        """bool [S]: which recipes are to draft, for so many requests of each."""
        present = np.flatnonzero(counts)
        alone = {s: self._rate_alone(s, int(counts[s]), batch) for s in present.tolist()}
        baseline = batch / float(self.costs.step_seconds(batch, batch))
        chosen, best = np.zeros(len(counts), np.bool_), baseline * (STAY_MARGIN if self.on else ON_MARGIN)
        tried = chosen.copy()
        for s in sorted(alone, key=lambda s: -alone[s]):
            tried[s] = True
            rate = alone[s] if tried.sum() == 1 else float(self.rates(np.where(tried, counts, 0), batch)[1:].max())
            if rate > best:
                chosen, best = tried.copy(), rate
        return chosen

    # -- a round -------------------------------------------------------------------------------------------------------

    def begin(self, request_ids: Sequence[str], places: Places, max_draft_len: int, rest: RestOfBatch = ALONE) -> None:
        super().begin(request_ids, places, min(max_draft_len, self.longest), rest)
        self.log.begin(request_ids, self.max_draft_len)
        batch = len(request_ids)
        if not batch:
            return
        counts = np.bincount(places, minlength=len(self.recipes))
        self._round = counts, batch + rest.requests
        rates = self.rates(*self._round)
        self._best_len = min(max(int(rates.argmax()), 1), self.max_draft_len)
        self.rate = float(rates.max()) if rest.rate is None else rest.rate
        self.margin = float(rates.max() / rates[0]) - 1
        self.places, self.kinds = np.asarray(places), kinds_of(places)
        self.survival = np.ones(batch)
        self.tokens = batch
        self.read = np.zeros(batch, np.intp)
        # What the decisions of this round look up: prices by number of requests and by number of query tokens.
        self.pass_price = {s: np.concatenate([[0.0], self.costs.pass_seconds(self.recipes[s], np.arange(1, n + 1))])
                           for s, n in enumerate(counts.tolist()) if n}  # fmt: skip
        whole_batch = batch + rest.requests
        if self.widths is None:
            query_tokens = rest.query_tokens + np.maximum(np.arange(batch * (self.max_draft_len + 1) + 1), batch)
        else:  # by nodes of the largest draft
            nodes = np.maximum(np.arange(self.max_draft_len + 2), rest.most_nodes)
            query_tokens = whole_batch * self._fitting(nodes.astype(np.int32))
        self.step_price = self.costs.step_seconds(whole_batch, query_tokens)
        self.next = np.stack([record.next_given.rates for record in self.records])
        chances = np.array([record.next_given.mean for record in self.records])
        self.series = np.cumsum(chances[:, None] ** np.arange(self.horizon), 1)

    def expected_len(self) -> int:
        return self._best_len

    def should_continue(self, position: int, rows: Ints, top: Floats, entropy: Floats | None) -> Flags:
        more = np.zeros(len(rows), np.bool_)
        if position < self.max_draft_len:
            self.log.put(position, rows, top[:, :1])
        left = self.max_draft_len - position - 1
        if left < 1 or not len(rows):
            return more
        confidence, places = top[:, 0], self.places[rows]
        self.tokens += len(rows)
        self.survival[rows] *= self.costs.acceptance.given_parent(confidence, self.kinds[rows], position + 1)
        chance = self.survival[rows] * self.next[places, to_bins(confidence)]
        order = np.lexsort((-chance, self.read[rows] <= position + 1))  # first those whose next token is known
        k = np.arange(1, len(rows) + 1)[:, None]
        m = np.arange(1, min(left, self.horizon) + 1)
        to_run = (self.read[rows[order], None] - position) <= m  # the m-th one from here, for each request
        passes = sum(price[(to_run & (places[order, None] == s)).cumsum(0)] for s, price in self.pass_price.items())
        gain = np.cumsum(chance[order, None] * self.series[places[order]][:, m - 1], 0)
        now, more_nodes = (self.tokens, k * m) if self.widths is None else (position + 2, m)
        price = np.cumsum(passes, 1) + self.step_price[now + more_nodes] - self.step_price[now]
        surplus = (gain - self.rate * self.costs.overrun * price).max(1)
        best = int(np.argmax(surplus))
        if surplus[best] > 0:
            more[order[: best + 1]] = True
        return more

    def record_acceptance(self, request_ids: Sequence[str], drafted: Ints, accepted: Ints, path: Ints) -> None:
        features, position, good, place = self.log.verified(request_ids, drafted, accepted)
        bins = to_bins(features[:, 0])
        pairs = np.flatnonzero((place[1:] == place[:-1]) & (position[1:] == position[:-1] + 1))
        known = np.array([self.log.row.get(request, -1) for request in request_ids], np.intp)
        places = np.where(known >= 0, self.places[known], NONE) if len(self.log.row) else np.full(len(known), NONE)
        # Passes were paid for what an engine or a controller has left out of verification, too.
        passes = np.where(known >= 0, self.log.count[known], 0) if len(self.log.row) else np.zeros(len(known), np.int32)
        for number, record in enumerate(self.records):
            mine = pairs[places[place[pairs]] == number]
            record.next_given.add(bins[mine], good[mine + 1])
            rounds = (places == number) & (passes > 0)
            if rounds.any():
                judged = rounds & (drafted > 0)
                if judged.any():
                    self.trials.judge(record, drafted[judged], path[judged], paid=self.on, could_pay=self._could_pay)
                record.update(passes[rounds], drafted[rounds], path[rounds])
        if not self.on:
            self._decide_anew()
