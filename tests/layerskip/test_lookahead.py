"""Lookahead policies: longest drafts and thresholds; `cost`: lengths near the best fixed one, plain where nothing
pays, and the set that is worth most."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from lookahead_tools import RECIPE, cost

from layerskip_plugin.lookahead.base import Confidence, FixedLength, Lookahead
from layerskip_plugin.lookahead.cost import FIRST_TRIALS, Cost
from layerskip_plugin.lookahead.disco import Classifier, Disco
from layerskip_plugin.rounds import Candidate
from layerskip_plugin.skip_set import SkipSet
from tests.support.simulated import SETS, Passes, ScheduledPasses, Text

PLAIN = 0.02  # seconds of a step of one token
SHAPES = ((12,), (12,), (12, 3), (3,), (3, 1), (1,))
ALWAYS = Classifier(tuple(np.ones(shape, np.float32) for shape in SHAPES), threshold=0.5, max_length=99)


def served(one_pass: float, more_tokens: float = 0.02, **options: Any) -> Passes:
    """A machine on which a draft pass, and a further query token, take these shares of a plain step."""
    return Passes(lambda batch, tokens: PLAIN * (1 + more_tokens * (tokens - 1)), times(one_pass), **options)


def times(one_pass: float) -> Callable[[int], float]:
    return lambda requests: PLAIN * one_pass


@pytest.mark.parametrize("policy", [FixedLength(99), Confidence(0.0), Disco(ALWAYS), None], ids=str)
def test_the_longest_draft_allowed_is_never_exceeded_and_reached(policy: Lookahead | None) -> None:
    for longest in (1, 2, 7):
        assert served(1e-4, 0.0, most=longest, lookahead=policy).run(3, Text(1.0, 0.999), 30)[:, 2].max() == 3 * longest


def test_confidence_keeps_the_token_that_it_stops_at() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        p = rng.random((5, 8), np.float32)
        engine = served(1e-4, 0.0, most=8, lookahead=Confidence(0.4))
        engine.run(5, Text(0.5, lambda position, rows, p=p: p[rows, position]), 1)
        assert engine.drafted.tolist() == [next((i + 1 for i, x in enumerate(row) if x < 0.4), 8) for row in p]


def said(accept: float) -> Text:
    """Text whose drafts are accepted as they promise."""
    return Text(accept, accept)


def share(rows: np.ndarray) -> float:
    """The share of steps with drafts."""
    return float((rows[:, 2] > 0).mean())


def accepted_at(policy: Cost, rates: Sequence[float]) -> None:
    """Drafts of each recipe were accepted at these rates."""
    for record, a in zip(policy.records.values(), rates, strict=True):
        record.reached[:] = record.verified[:] = a ** np.arange(64)
        record.accepted[:] = a ** np.arange(1, 65)


@pytest.mark.parametrize("alpha", [0.95, 0.9, 0.8])
def test_the_length_is_near_that_with_the_most_tokens_per_time(alpha: float) -> None:
    engine = served(0.3, most=12)
    rows = engine.run(1, said(alpha), 600)[300:]
    tokens = ((1 - alpha ** (rows[:, 2] + 1)) / (1 - alpha)).sum()
    assert tokens / rows[:, 1].sum() > 0.97 * max(engine.rates(1, said(alpha)))


def test_unlikely_tokens_that_are_accepted_do_not_end_drafts_for_ever() -> None:
    """A pass costs more than the prior's acceptance brings, so behind which probabilities it pays has to be tried."""
    engine, rng = served(0.55, 0.01, most=5), np.random.default_rng(0)
    rows = engine.run(1, Text(0.98, lambda position, rows: rng.beta(1.2, 0.5, len(rows))), 1500)[-300:]
    assert share(rows) > 0.95 and rows[:, 2].mean() > 4


def test_off_where_nothing_pays_and_on_again_when_it_does() -> None:
    """A draft pass at 85 % of a step with 80 % accepted: slower at every length."""
    engine = served(0.85)
    assert 0 < share(engine.run(1, said(0.8), 4000)[500:]) <= 0.01
    engine.pass_seconds = times(0.2)
    assert share(engine.run(1, said(0.95), 1200)[-200:]) > 0.95
    assert share(served(0.3, 0.03).run(1, said(0.05), 1000)) < 0.05


def test_a_larger_batch_drafts_less_where_verification_is_bound_by_compute() -> None:
    shares, lengths = [], []
    for batch in (1, 8, 32):
        engine = Passes(lambda batch, tokens: PLAIN * (1 + 0.06 * max(0, tokens - 17)), times(0.4))
        rows = engine.run(batch, said(0.9), 300)[150:]
        shares.append(share(rows))
        lengths.append(rows[:, 2].mean() / batch)
    assert lengths[0] > lengths[1] + 1 and shares[2] < 0.1


class Varied(ScheduledPasses):
    """Text of which a step's drafts are sure up to a place that differs from step to step."""

    def draft(self, ids: list[str], gained: list[list[int]]) -> np.ndarray:
        self.sure = int(self.random.integers(self.most + 1))
        return super().draft(ids, gained)

    def chance(self, text: Text) -> np.ndarray:
        return np.where(np.arange(self.most) < self.sure, 0.98, 0.05)


def test_where_the_engine_schedules_lengths_passes_stop_when_they_do_not_pay() -> None:
    """As on vLLM's model runner V2; and where none pays, none is run."""
    speeds = []
    for lookahead in (None, FixedLength(99)):
        engine = Varied(lambda batch, tokens: PLAIN * (1 + 0.02 * (tokens - 1)), times(0.2), lookahead=lookahead)
        text = Text(0.0, lambda position, rows, engine=engine: 0.98 if position < engine.sure else 0.05)
        rows = engine.run(1, text, 2000)[1000:]
        speeds.append(rows[:, 0].sum() / rows[:, 1].sum())
    assert speeds[0] > 1.1 * speeds[1]
    dear = ScheduledPasses(lambda batch, tokens: PLAIN, times(0.85)).run(1, said(0.5), 3000)[1500:]
    assert share(dear) < 0.05


def test_confidence_decides_between_requests() -> None:
    """Two kinds of requests; the tokens of one are sure. Only it is drafted far for."""
    engine, chance = served(0.25, 0.03), np.array([0.97, 0.97, 0.3, 0.3])
    text = Text(chance[:, None], lambda position, rows: chance[rows])
    engine.run(4, text, 400)
    drafted = np.median([engine.drafted for _ in range(9) if len(engine.run(4, text, 1))], 0)
    assert drafted[:2].min() >= 4 and drafted[2:].max() <= 2


VOTED = [SkipSet(4, frozenset({i}), frozenset()) for i in range(4)]


@pytest.mark.parametrize(
    ("votes", "rates", "draft", "best"),
    [
        ((3, 1, 0, 0), (0.8, 0.8, 0.9, 0.9), 0.1, 0),  # the majority's
        ((2, 2, 0, 0), (0.7, 0.9, 0.8, 0.8), 0.1, 1),
        ((1, 2, 1, 0), (0.9, 0.2, 0.5, 0.8), 0.1, 0),  # a smaller part with much better drafts
        ((1, 1, 1, 1), (0.9,) * 4, 0.5, 0),  # not worth its passes for one request, but for all four
    ],
)
def test_all_draft_with_the_set_that_is_worth_most_to_those_that_have_it(votes, rates, draft, best) -> None:
    policy = cost(draft, {1: 1.0, 20: 1.2, 300: 4.2}, VOTED)
    accepted_at(policy, rates)
    candidates = [Candidate(recipe, n, 4) for recipe, n in zip(VOTED, votes, strict=True) if n]
    assert policy.choose(candidates, 4, 300.0) == VOTED[best] == policy.recipe_of_round()


def test_the_longest_draft_makes_all_requests_as_wide() -> None:
    """Eight requests, one of which drafts: five tokens of it are 40 of the step's."""
    step, chance, c = {8: 1.0, 13: 1.0, 14: 1.3, 48: 2.0, 64: 2.4}, 0.9, 0.02
    alone = cost(c, step, longest=5)
    accepted_at(alone, [chance])
    assert alone.rates(RECIPE, 1, 8)[1:].max() > 1.1 * 8, "where every request has its own length it pays"
    for widths in (range(1, 7), (1, 2, 4, 8)):
        policy = cost(c, step, widths=widths, longest=5)
        accepted_at(policy, [chance])
        rates = policy.rates(RECIPE, 1, 8)
        for m in range(1, 6):
            # Tokens are drafted as long as those before were accepted with certainty enough: to length d.
            seconds = 0.0
            for d in range(1, m + 1):
                p, width = chance ** (d - 1) * (1 - chance * (d < m)), min(w for w in widths if w >= d + 1)
                seconds += p * (c * d + float(policy.measured.step_seconds(8, 8 * width)))
            gain = sum(chance**d for d in range(1, m + 1))
            assert rates[m] == pytest.approx((8 + gain) / seconds)
    # A step without drafts is as wide as the smallest width, which is four where graphs of one could not be captured.
    wide = cost(0.01, {8: 1.0, 32: 2.0}, widths=(4, 8), longest=5)
    assert wide.rates(RECIPE, 1, 8)[0] == pytest.approx(8 / 2.0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("new", "most"), [(False, 300), (True, 40)])
def test_acceptance_that_rises_is_noticed(seed: int, new: bool, most: int) -> None:
    """Off at .35 for a long time, then .97: within 300 steps; and at once if the set is a new one."""
    engine = served(0.5, 0.015, most=5)
    engine.random = np.random.default_rng(seed)
    assert share(engine.run(1, said(0.35), 2000)) < 0.2
    if new:
        engine.method.lookahead.use(SETS[:1])
    drafts = engine.run(1, said(0.97), most)[:, 2] > 0
    assert any(drafts[i : i + 10].all() for i in range(most - 9)), "for ten steps in a row"


def test_another_set_is_tried_now_and_then() -> None:
    """The text changes: what was the worse set is found again."""
    engine, (one, other) = served(0.2, 0.005, sets=SETS, most=6), SETS
    for best, worse, steps in ((one, other, 600), (other, one, 1500)):
        engine.run(2, Text({best: 0.97, worse: 0.5}, 0.8), steps)
        assert engine.used[-50:].count(best) > 40


def test_nothing_is_drafted_where_no_set_pays() -> None:
    """But for a round that the prior advises, first trials, and rare probes in which each set has its turn."""
    engine = served(0.95, 0.005, sets=SETS, most=6)
    assert (engine.run(2, Text(0.0, 0.8), 100)[:, 2] > 0).sum() == 1 + FIRST_TRIALS * 2
    engine.run(2, Text(0.9, 0.8), 400)
    assert share(engine.run(2, Text(0.9, 0.8), 2500)) < 0.01
    assert {*engine.used[-2500:]} - {None} == set(SETS)


def test_sets_are_tried_at_once_at_a_context_that_is_new() -> None:
    """The roofline promises nothing, the passes are fast: that is found out in a few steps, not by a rare probe."""
    engine = served(0.95, 0.005, most=4)
    engine.run(1, Text(0.97, 0.8), 300)
    engine.context, engine.pass_seconds = 6000, times(0.3)
    assert share(engine.run(1, Text(0.97, 0.8), 40)[-20:]) > 0.9
