"""Draft while one more token is expected to pay; draft nothing if no length pays."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freedraft.cost.acceptance import PASS_KINDS
from freedraft.cost.controller import holding
from freedraft.cost.measured import Measured
from freedraft.cost.probes import ProbeSchedule
from freedraft.cost.step_times import row_of
from layerskip_plugin.lookahead.base import Lookahead
from layerskip_plugin.rounds import MAX_DRAFT_LEN, Candidate, Flags, Floats, Ints, Outcome, RecipeRecord
from layerskip_plugin.skip_set import SkipSet

PRIOR = 0.8  # initial rate of acceptance
MAX_KINDS = 16
HORIZON = 8  # further tokens of a draft considered by a decision
# Steps for which a decision (to draft, not to draft) holds while batch and candidates stay the same.
DECISION_STEPS, IDLE_STEPS = 4, 16
# Hysteresis: gain over no drafting required to switch drafting on again, and to keep it on.
ON_MARGIN, STAY_MARGIN = 1.05, 1.02
# Steps between trials of drafting while no length pays: first and longest interval.
FIRST_PROBE, RAREST_PROBE = 128, 256
# Rounds between trials of another recipe than the best: first and longest interval.
FIRST_OTHER, RAREST_OTHER = 16, 256
# Trials of each recipe at new batch sizes and contexts, where pass times are guesses; the first pass warms up and is
# not timed.
FIRST_TRIALS = 3
# A trial is a surprise if it brings SURPRISE more tokens than expected. Short drafts cannot; for them, if a share GOOD
# is accepted where less than DOUBTFUL was expected.
SURPRISE, GOOD, DOUBTFUL = 0.5, 0.9, 0.7
# Weight of a record, in rounds, after a surprise: the text has changed.
DOUBTED_WEIGHT = 3.0


class Cost(Lookahead):
    """Maximises tokens per second under measured costs, over all requests of a step together.

    A step of B requests yields N = B + (accepted tokens) in D = (draft passes) + (verification) seconds. The best
    long-run ratio N / D results from going on exactly while the expected gain of more tokens exceeds `rate` times their
    price, where `rate` is that best ratio (Dinkelbach): the rate of rounds so far, at least that of no drafting.

    After each token: its probability p of acceptance follows from its confidence, as learnt per recipe, and the
    probability s that the request's draft is accepted so far is the product of these; the next tokens are taken to be
    as likely as the present one. For the k requests with the best s * p and m <= `HORIZON` more tokens each, the gain
    is the sum of s * (p + ... + p^m); the price is m draft passes and k * m more query tokens. The k of the best
    surplus over all (k, m) go on, if it is positive. Passes that have already run are free (`read`).

    Args:
        recipes: skip sets with the window.
        longest: most draft tokens per request.
        widths: see `EngineContext`.
        scheduled: whether steps verify a scheduled number of tokens, however many are drafted: then only passes have a
            price.
    """

    def __init__(
        self, measured: Measured, recipes: Sequence[SkipSet], longest: int, widths: Sequence[int] | None = None, *,
        scheduled: bool = False,
    ) -> None:  # fmt: skip
        self.measured, self.widths = measured, None if widths is None else np.array(widths, np.int32)
        self.scheduled = scheduled
        self.use(recipes)
        self.longest = min(longest, MAX_DRAFT_LEN)
        self.on = True
        self.rate = self.margin = 0.0  # the best tokens per second; expected gain of the last round over no drafting
        self._best: SkipSet | None = None  # recipe of the present candidates
        self._pays = False  # whether it is expected to beat no drafting
        self._recipes: list[SkipSet] = []  # of the present step's candidates
        self._row = 0  # of its batch and context, see `row_of`
        self._key: tuple[Any, ...] = ()  # its batch and candidates

    def use(self, recipes: Sequence[SkipSet]) -> None:
        kinds = (PASS_KINDS + min(number, MAX_KINDS - 1) for number in range(len(recipes)))
        self.records = {recipe: RecipeRecord(PRIOR, kind) for recipe, kind in zip(recipes, kinds, strict=True)}
        for record in self.records.values():
            self.measured.acceptance.forget(record.kind)
        self.trials, self._steps_left = Trials(), 0

    # -- before a round ------------------------------------------------------------------------------------------------

    def estimate(self, recipe: SkipSet, requests: int, max_draft_len: int) -> tuple[NDArray[np.float64], ...]:
        """float64 [M] each, by maximum draft length m = 1 .. M: expected accepted tokens of these requests together,
        their draft tokens together, and seconds of the passes."""
        record, most = self.records[recipe], min(max_draft_len, self.longest)
        if self.reads_ahead:
            seconds = self.measured.pass_seconds(recipe, requests) * np.arange(1, most + 1)
        else:
            reached = record.reached[:most]
            any_left = 1 - (1 - np.minimum(reached, 1)) ** requests
            rows = requests * reached / np.maximum(any_left, 1e-9)
            seconds = np.cumsum(any_left * self.measured.pass_seconds(recipe, np.maximum(rows, 1)))
        gain, tokens = (requests * np.cumsum(share[:most]) for share in (record.accepted, record.verified))
        return gain, tokens, seconds

    def rates(self, recipe: SkipSet, requests: int, batch: int) -> NDArray[np.float64]:
        """float64 [M + 1]: expected tokens per second of a step in which `requests` draft, by maximum draft length from
        0."""
        (gain, tokens, seconds), widths = self.estimate(recipe, requests, self.longest), self.widths
        if widths is None:
            width, verification = 1, self.measured.step_seconds(batch, batch + tokens)
        else:  # all requests have the longest draft's width: a position costs if any request drafts there
            width = int(widths[0])
            by_place = self.measured.step_seconds(batch, batch * holding(np.arange(2, self.longest + 2), widths))
            verified = self.records[recipe].verified[1 : self.longest]
            anyone = 1 - (1 - np.minimum(verified, 1)) ** requests
            verification = by_place[0] + np.concatenate([[0.0], np.cumsum(anyone * np.diff(by_place))])
        drafting = (batch + gain) / (seconds + verification)
        return np.concatenate([[batch / float(self.measured.step_seconds(batch, batch * width))], drafting])

    def choose(self, candidates: Sequence[Candidate], batch: int, context: float) -> SkipSet | None:
        """The recipe of most tokens per second, counting only requests that voted for it: votes weighted by expected
        gain."""
        self._recipes, self._row = [candidate.recipe for candidate in candidates], row_of(batch, context)
        key = batch, *candidates
        if self._steps_left == 0 or key != self._key:
            self._key, self._best, self._pays = key, None, False
            if candidates:
                best = max(candidates, key=lambda each: self.rates(each.recipe, each.votes, batch)[1:].max())
                alone, *rates = self.rates(best.recipe, best.requests, batch).tolist()
                self._best, self._pays = best.recipe, max(rates) > alone * (STAY_MARGIN if self.on else ON_MARGIN)
            self._steps_left = DECISION_STEPS if self._pays else IDLE_STEPS
        self._steps_left -= 1
        return self._best

    def recipe_of_round(self, *, pays: bool = False) -> SkipSet | None:
        """The recipe of this step: the best one if it is expected to beat no drafting, else one to try, or None. Called
        at most once per step. pays: the engine has decided so, whatever `choose` has found."""
        self.on = self._pays or pays
        if self._best is None:
            return None
        if self.on:
            return self.trials.beside(self._best, self._recipes)
        return self.trials.trial(self._recipes, self._row)

    # -- a round -------------------------------------------------------------------------------------------------------

    def begin(self, requests: int, recipe: SkipSet, max_draft_len: int, others: int) -> None:
        super().begin(requests, recipe, min(max_draft_len, self.longest), others)
        record, batch = self.records[recipe], requests + others
        rates = self.rates(recipe, requests, batch)
        self._mean_len = max(int(rates.argmax()), 1)
        self.rate = float(rates.max())
        self.margin = self.rate / float(rates[0]) - 1
        self.kind = record.kind
        self.survival = np.ones(requests)
        self.tokens = requests
        # Prices for the decisions of this round, by number of requests and by number of query tokens.
        self.pass_price = self.measured.pass_seconds(recipe, np.arange(1, requests + 1))
        if self.widths is None:
            query_tokens = others + np.maximum(np.arange(requests * (self.max_draft_len + 1) + 1), requests)
        else:  # by nodes of the largest draft
            query_tokens = batch * holding(np.maximum(np.arange(self.max_draft_len + 2), 1), self.widths)
        self.step_price = self.measured.step_seconds(batch, query_tokens)
        if self.scheduled:  # as measured, with the passes of such a round
            seconds = float(self.measured.step_seconds(batch, batch * (1 + self.max_draft_len)))
            self.rate = (batch + float(self.estimate(recipe, requests, self.max_draft_len)[0][-1])) / seconds
            self.step_price[:] = 0.0

    def end(self, length: int) -> None:
        """Keep the expected length, which is the best one by costs."""

    def should_continue(self, position: int, rows: Ints, top: Floats, entropy: Floats) -> Flags:
        more = np.zeros(len(rows), np.bool_)
        left = self.max_draft_len - position - 1
        if left < 1 or not len(rows):
            return more
        confidence, kinds = top[:, 0], np.full(len(rows), self.kind, np.uint16)
        self.tokens += len(rows)
        likely = self.measured.acceptance.given_parent(confidence, kinds, position + 1)
        self.survival[rows] *= likely
        order = np.argsort(-self.survival[rows] * likely, kind="stable")
        k = np.arange(1, len(rows) + 1)[:, None]
        m = np.arange(1, min(left, HORIZON) + 1)
        passes = self.pass_price[k - 1] * (self.read - position <= m).cumsum()
        gain = np.cumsum((self.survival[rows, None] * np.cumsum(likely[:, None] ** m, 1))[order], 0)
        now, more_nodes = (self.tokens, k * m) if self.widths is None else (position + 2, m)
        price = passes + self.step_price[now + more_nodes] - self.step_price[now]
        surplus = (gain - self.rate * price).max(1)
        best = int(np.argmax(surplus))
        if surplus[best] > 0:
            more[order[: best + 1]] = True
        return more

    def learn_outcome(self, outcome: Outcome) -> None:
        record = self.records.get(outcome.recipe)
        if record is not None:
            verified = outcome.verified > 0
            if verified.any() and not self.on:
                self.trials.judge(record, outcome.verified[verified], outcome.path[verified])
            record.update(outcome)
        if not self.on:
            self._steps_left = 0


class Trials:
    """Occasional rounds that are not expected to pay, or not to be the best, to keep estimates fresh."""

    def __init__(self) -> None:
        self._again = False  # the last trial surprised, so another one follows at once
        self._last: SkipSet | None = None
        self._probes = ProbeSchedule(FIRST_PROBE, RAREST_PROBE)
        self._others = ProbeSchedule(FIRST_OTHER, RAREST_OTHER)
        self._tried: Counter[tuple[SkipSet, int]] = Counter()

    def trial(self, recipes: Sequence[SkipSet], row: int) -> SkipSet | None:
        """The recipe to try in a step that is not expected to pay; None: no trial.

        Args:
            recipes: possible recipes of the step.
            row: of its batch and context, see `row_of`.
        """
        again, self._again = self._again, False
        untried = next((recipe for recipe in recipes if self._tried[recipe, row] < FIRST_TRIALS), None)
        if again and self._last in recipes:
            return self._last
        if untried is not None:
            self._last = untried
            self._tried[untried, row] += 1
            return untried
        return self._take_turns(recipes) if self._probes.due() else None

    def beside(self, best: SkipSet, recipes: Sequence[SkipSet]) -> SkipSet:
        """The recipe of a round that is expected to pay: the best one, or occasionally another, in turns."""
        self._probes.reset()
        self._again = False
        return self._take_turns(recipes) if len(recipes) > 1 and self._others.due() else best

    def _take_turns(self, recipes: Sequence[SkipSet]) -> SkipSet:
        last = recipes.index(self._last) if self._last in recipes else -1
        self._last = recipes[(last + 1) % len(recipes)]
        return self._last

    def judge(self, record: RecipeRecord, drafted: Ints, accepted: Ints) -> None:
        """Compare a trial's int32 [R] drafted and accepted tokens with the recipe's record, before that is updated."""
        length, brought = drafted.mean(), accepted.mean()
        expected = record.accepted[: max(1, int(length))].sum()
        if brought > expected + SURPRISE or (brought >= GOOD * length and expected < DOUBTFUL * length):
            self._again, record.weight = True, min(record.weight, DOUBTED_WEIGHT)
