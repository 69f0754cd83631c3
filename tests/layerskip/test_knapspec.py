"""KnapSpec while serving: on made-up models whose best set is known, and over a real model's sublayers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import pytest
import torch

from freedraft.engines.many_sets import Sublayer, forward, run_sublayer
from layerskip_plugin.knapsack_search import search
from layerskip_plugin.pass_times import PassTimes
from layerskip_plugin.selection.online_search import KnapSpec
from layerskip_plugin.selection.serving import Selector
from layerskip_plugin.skip_set import SkipSet

LAYERS = 10


def times(attention: float = 1.0, mlp: float = 1.0, head: float = 0.5, verify: float = 0.3) -> PassTimes:
    """A step takes what a draft pass of all sublayers takes, and `verify` more for each further query token."""
    whole = LAYERS * (attention + mlp) + head
    return PassTimes(attention, mlp, head, lambda n: whole + verify * (n - 1))


class Made:
    """Matchness falls with what is skipped; scores and searches know it as well as 32 tokens tell."""

    def __init__(self, hardest: float = 0.3, seed: int = 0) -> None:
        self.rng = np.random.default_rng(seed)
        self.importance = self.rng.permutation(np.geomspace(0.001, hardest, 2 * LAYERS))
        self.times: PassTimes | None = times()
        self.now, self.seconds = 0.0, 0.001
        self.spent: list[float] = []
        self.weights: list[tuple[int, int]] = []

    def true(self, skip: SkipSet) -> float:
        return float(np.prod(1 - self.importance[list(skip.sublayers)]))

    def _take(self, sets: int) -> None:
        self.spent.append(self.seconds * sets)
        self.now += self.spent[-1]

    def evaluate(self, sets: Sequence[SkipSet]) -> np.ndarray:
        self._take(len(sets))
        return self.rng.binomial(32, [self.true(s) for s in sets]) / 32

    def propose(self, weights: tuple[int, int], most: int, base: SkipSet) -> list[SkipSet]:
        """The best set of each weight by importances that are off."""
        self._take(most)
        self.weights.append(weights)
        seen = self.importance * np.exp(0.5 * self.rng.standard_normal(2 * LAYERS))
        best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, base.sublayers)}
        for i, lost in enumerate(seen):
            if i in base.sublayers:
                continue
            for weight, (value, skipped) in sorted(best.items(), reverse=True):
                heavier = weight + weights[i % 2]
                if heavier <= most and value + lost < best.get(heavier, (np.inf,))[0]:
                    best[heavier] = value + lost, (*skipped, i)
        return [SkipSet.of_sublayers(skipped, LAYERS, "m") for _, skipped in best.values()]

    def policy(self) -> KnapSpec:
        return KnapSpec(LAYERS, self.evaluate, self.propose, lambda: self.times, "m", lambda: self.now)

    def rate(self, skip: SkipSet) -> float:
        """Tokens per time, by the closed form."""
        assert self.times is not None
        if not skip:
            return 1 / self.times.verify(1)
        a = min(self.true(skip), 1 - 1e-9)
        kept = sum(not bit for bit in skip.bits[::2]), sum(not bit for bit in skip.bits[1::2])
        draft = kept[0] * self.times.attention + kept[1] * self.times.mlp + self.times.head
        return max((1 - a ** (d + 1)) / (1 - a) / (d * draft + self.times.verify(d + 1)) for d in range(1, 11))

    def best(self) -> float:
        """Of the sets that skip the least important sublayers, half of them at most: none of the same size is better,
        where all take the same time."""
        order = np.argsort(self.importance)
        return max(self.rate(SkipSet.of_sublayers(order[:n], LAYERS)) for n in range(LAYERS + 1))


@pytest.mark.parametrize("seconds", [0.001, 0.25])
def test_it_finds_a_set_of_about_the_most_tokens_per_time(seconds: float) -> None:
    """Also where a search is too slow to skip more than a few sublayers at once."""
    found = []
    for seed in range(5):
        made = Made(seed=seed)
        made.seconds = seconds
        policy = made.policy()
        assert policy.max_lengths(np.array([7, 8], np.int32)).tolist() == [0, 0], "nothing is drafted at first"
        for _ in range(600):
            before = policy.incumbent
            assert policy.step(1.0) == (policy.incumbent != before)
        assert policy.sets() == {"knapspec": policy.incumbent} and policy.max_lengths(np.zeros(2, np.int32)) is None
        plain = 1 / times().verify(1)
        found.append((made.rate(policy.incumbent) - plain) / (made.best() - plain))
    assert np.median(found) > 0.9 and min(found) > 0.8, found


def test_it_follows_what_sublayers_take() -> None:
    """As context grows, attention costs more, and more of it is skipped; weights are the times' ratio."""
    made = Made(hardest=0.05)
    made.importance[:] = 0.03
    policy = made.policy()
    skipped = []
    for attention, mlp, weights in ((0.25, 1.0, (1, 4)), (4.0, 1.0, (4, 1))):
        made.times = times(attention, mlp)
        for _ in range(400):
            policy.step(1.0)
        assert made.weights[-1] == weights
        skipped.append((len(policy.incumbent.attention), len(policy.incumbent.mlp)))
    assert skipped[0][0] < skipped[0][1] and skipped[1][0] > skipped[1][1]


def test_what_does_not_pay_is_never_drafted_with() -> None:
    made = Made()
    made.importance[:] = 0.25
    made.times = times(verify=12.0)
    assert made.best() < 1.02 / made.times.verify(1)
    policy = made.policy()
    for _ in range(300):
        policy.step(1.0)
    assert not policy.incumbent and policy.candidates > 20


def test_without_times_nothing_is_searched() -> None:
    made = Made()
    made.times = None
    policy = made.policy()
    assert not any(policy.step(1.0) for _ in range(10)) and not made.spent


@pytest.mark.parametrize("seconds", [0.001, 0.02, 0.2])
def test_a_batch_takes_less_than_a_second_and_all_of_them_their_share(seconds: float) -> None:
    made = Made()
    made.seconds = seconds
    selector = Selector(made.policy(), 0.05)
    selector.budget.clock, selector.budget.updated = (lambda: made.now), 0.0
    for _ in range(40000):
        made.now += 0.03
        selector.search(lambda: True)
    assert max(made.spent[2:]) <= 1.0
    assert 0.5 * 0.05 * made.now < sum(made.spent) < 1.02 * 0.05 * made.now
    assert selector.selection.candidates > 100 or seconds == 0.2


def test_where_a_set_takes_a_second_to_score_one_is_scored_at_a_time() -> None:
    made = Made()
    made.seconds = 1.0
    policy = made.policy()
    for _ in range(200):
        policy.step(1.0)
    assert policy.candidates > 10 and policy.incumbent


def test_sublayers_one_by_one_are_those_sets_in_one_pass() -> None:
    """In parts of a pass's size, padded; attention mixes the rows of each stream."""
    torch.manual_seed(0)
    weights, width, size = [torch.randn(6, 6) / 3 for _ in range(2 * LAYERS)], 4, 6

    def run(index: int, rows: int) -> Callable[[torch.Tensor], torch.Tensor]:
        def attend(x: torch.Tensor) -> torch.Tensor:
            assert len(x) == rows, "attention runs over a whole pass"
            return torch.tanh((x.view(-1, width, size) @ weights[index]).cumsum(1)).flatten(0, 1)

        return (lambda x: torch.tanh(x @ weights[index])) if index % 2 else attend

    def sublayers(sets: int) -> list[Sublayer]:
        return [Sublayer(torch.nn.functional.normalize, run(i, sets * width), i % 2 == 0) for i in range(2 * LAYERS)]

    embedded = torch.randn(width, size)
    for base in ((), (0, 3, 4, 19)):
        found = search(embedded, partial(run_sublayer, sublayers(3), 3), 2 * LAYERS, (2, 1), 7, base=base)
        assert found.weight.tolist() == list(range(8))
        assert found.skipped[:, list(base)].all() and found.skipped[0].sum() == len(base)
        besides = found.skipped.copy()
        besides[:, list(base)] = False
        assert (besides @ np.array([2, 1] * LAYERS) == found.weight).all()
        together = forward(embedded.expand(8, -1, -1), sublayers(8), found.skipped)
        torch.testing.assert_close(found.states, together)
