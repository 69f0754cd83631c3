"""Cost lookahead: decisions against exhaustive search, lengths against the formula, OFF where nothing pays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from lookahead_tools import RECIPE, Driver, KnownCosts, cost, share

from layerskip_plugin.lookahead import Cost
from layerskip_plugin.rounds import Candidate
from layerskip_plugin.skip_set import SkipSet


def accepted_at(policy: Cost, rates: Sequence[float]) -> None:
    """Drafts of each recipe were accepted at these rates."""
    for record, a in zip(policy.records.values(), rates, strict=True):
        record.reached[:] = record.verified[:] = a ** np.arange(64)
        record.accepted[:] = a ** np.arange(1, 65)


@pytest.mark.parametrize("alpha", [0.95, 0.9, 0.8])
def test_the_length_is_near_that_with_the_most_tokens_per_time(alpha: float) -> None:
    """Batch 1: (1 + a + ... + a^d) / (d * draft + verify(d + 1))."""
    draft, verify = 0.3, [1.0 + 0.02 * n for n in range(13)]
    driver = Driver(cost({1: draft}, {n + 1: t for n, t in enumerate(verify)}))
    assert share(driver.serve(600, alpha, 12, confidence=alpha)) > 0.99
    by_length = [sum(alpha**i for i in range(d + 1)) / (d * draft + verify[d]) for d in range(len(verify))]
    assert by_length[round(np.mean(driver.lengths[300:]))] > 0.98 * max(by_length)


def test_unlikely_tokens_that_are_accepted_do_not_end_drafts_for_ever() -> None:
    """A pass costs more than the prior's acceptance brings, so behind which probabilities it pays has to be tried."""
    driver = Driver(cost({1: 0.55}, {1: 1.0, 6: 1.05}))
    used = driver.serve(1500, 0.98, confidence=lambda position, rows: driver.rng.beta(1.2, 0.5, len(rows)))
    assert share(used) == 1 and np.mean(driver.lengths[-300:]) > 4


def test_off_where_nothing_pays_and_on_again_when_it_does() -> None:
    """A draft pass at 85 % of a step with 80 % accepted: slower at every length."""
    policy = cost({1: 0.85}, {1: 1.0, 16: 1.3})
    driver = Driver(policy)
    assert share(driver.serve(200, 0.8, 8, 0.8)) < 0.3 and 0 < share(driver.serve(4000, 0.8, 8, 0.8)) <= 0.01
    policy.costs = KnownCosts({1: 0.2}, {1: 1.0, 16: 1.3})
    driver.serve(1000, 0.95, 8, 0.95)
    assert share(driver.serve(200, 0.95, 8, 0.95)) == 1
    assert share(Driver(cost({1: 0.3}, {1: 1.0, 16: 1.5})).serve(1000, 0.05, 8, 0.05)) < 0.05


def test_a_larger_batch_drafts_less_where_verification_is_bound_by_compute() -> None:
    shares, lengths = [], []
    for batch in (1, 8, 32):
        driver = Driver(cost({1: 0.3, 32: 0.45}, {1: 1.0, 17: 1.0, 200: 12.0}))
        shares.append(share(driver.serve(300, 0.9, 8, 0.9, [Candidate(RECIPE, batch, batch)])))
        lengths.append(np.mean(driver.lengths[len(driver.lengths) // 2 :]))
    assert lengths[0] > lengths[1] + 1 and shares[2] < 0.1


def test_confidence_decides_between_requests() -> None:
    """Two kinds of requests; the tokens of one are sure. Only it is drafted far for."""
    driver = Driver(cost({1: 0.3, 4: 0.4}, {1: 1.0, 40: 2.2}))
    chance = np.array([0.97, 0.97, 0.3, 0.3], np.float32)
    for _ in range(400):
        drafted = driver.draft(list("abcd"), 8, lambda position, rows: chance[rows])
        driver.judge(drafted, driver.luck(drafted, chance, 8))
    assert drafted[:2].min() >= 4 and drafted[2:].max() <= 2


SETS = [SkipSet(4, frozenset({i}), frozenset()) for i in range(4)]


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
    policy = Cost(KnownCosts({recipe: {1: draft} for recipe in SETS}, {1: 1.0, 20: 1.2}), SETS)
    accepted_at(policy, rates)
    candidates = [Candidate(recipe, n, 4) for recipe, n in zip(SETS, votes, strict=True) if n]
    assert policy.choose(candidates, 4, 300.0) == SETS[best] == policy.recipe_of_round()


def test_the_longest_draft_makes_all_requests_as_wide() -> None:
    """Eight requests, one of which drafts: five tokens of it are 40 of the step's."""
    step, chance, c = {8: 1.0, 13: 1.0, 14: 1.3, 48: 2.0}, 0.9, 0.02
    alone = cost({1: c}, step, longest=5)
    accepted_at(alone, [chance])
    assert alone.rates(RECIPE, 1, 8)[1:].max() > 1.1 * 8, "where every request has its own length it pays"
    for widths in (range(1, 7), (1, 2, 4, 8)):
        policy = cost({1: c}, step, widths=widths, longest=5)
        accepted_at(policy, [chance])
        rates = policy.rates(RECIPE, 1, 8)
        for m in range(1, 6):
            # Tokens are drafted as long as those before were accepted with certainty enough: to length d.
            seconds = 0.0
            for d in range(1, m + 1):
                p, width = chance ** (d - 1) * (1 - chance * (d < m)), min(w for w in widths if w >= d + 1)
                seconds += p * (c * d + float(policy.costs.step(8 * width)))
            gain = sum(chance**d for d in range(1, m + 1))
            assert rates[m] == pytest.approx((8 + gain) / seconds)
    # A step without drafts is as wide as the smallest width, which is four where graphs of one could not be captured.
    wide = cost({1: 0.01}, {8: 1.0, 32: 2.0}, widths=(4, 8), longest=5)
    assert wide.rates(RECIPE, 1, 8)[0] == pytest.approx(8 / 2.0)


@pytest.mark.parametrize("seed", range(4))
def test_acceptance_that_rises_is_noticed(seed: int) -> None:
    """Off at .35 for a long time, then .97: within 300 steps; and at once if the set is a new one."""
    for new, most in ((False, 300), (True, 40)):
        policy = cost({1: 0.5}, {1: 1.0, 8: 1.1})
        driver = Driver(policy, seed)
        assert share(driver.serve(3000, 0.35, confidence=0.35)) < 0.2 and not policy.on
        if new:
            policy.use([RECIPE])
        on = [driver.serve(1, 0.97) != [None] and policy.on for _ in range(most)]
        assert any(all(on[step : step + 10]) for step in range(most - 9)), "for ten steps in a row"
