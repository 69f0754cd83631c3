"""SWIFT and KnapSpec on made-up traffic whose best set is known."""

from collections.abc import Sequence

import numpy as np
import pytest

from layerskip_plugin.pass_times import PassTimes
from layerskip_plugin.selection.online_search import BitSearch, KnapSpec, OnlineSearch, Swift
from layerskip_plugin.skip_set import SkipSet
from tests.support.steps import make_step

LAYERS = 10


def times(attention: float = 1.0, mlp: float = 1.0, verify: float = 0.3) -> PassTimes:
    """A step takes what a draft pass of all sublayers takes, and `verify` more for each further query token."""
    whole = LAYERS * (attention + mlp) + 0.5
    return PassTimes(attention, mlp, 0.5, lambda n: whole + verify * (n - 1))


class Traffic:
    """Matchness falls with the importance of what is skipped; scores of a window are off by luck, by default that of 32
    tokens. Time passes only while sets are scored or searched."""

    def __init__(
        self, hardest: float = 0.3, seed: int = 0, luck: float | None = None, seconds: float = 0.001,
        equal: bool = False,
    ) -> None:  # fmt: skip
        """equal: whether all sublayers are as important as the hardest."""
        self.rng, self.luck, self.seconds = np.random.default_rng(seed), luck, seconds
        self.importance = self.rng.permutation(np.geomspace(hardest if equal else 0.001, hardest, 2 * LAYERS))
        self.times: PassTimes | None = times()
        self.now, self.spent, self.calls, self.weights = 0.0, [], [], []

    def true(self, skip: SkipSet) -> float:
        return float(np.prod(1 - self.importance[list(skip.sublayers)]))

    def _take(self, sets: int) -> None:
        self.spent.append(self.seconds * sets)
        self.now += self.spent[-1]

    def observe(self, step: object) -> bool:
        return step is not None

    def __call__(self, sets: Sequence[SkipSet]) -> np.ndarray:
        self._take(len(sets))
        self.calls.append(list(sets))
        true = np.array([self.true(s) for s in sets])
        if self.luck is None:
            return self.rng.binomial(32, true) / 32
        return true + self.luck * self.rng.standard_normal(len(sets))

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

    def swift(self, **options: object) -> Swift:
        made = Swift(LAYERS, "m", ratio=0.3)
        vars(made).update({"patience": 60, "clock": lambda: self.now, "_updated": self.now} | options)
        made.prepare(self, None)
        return made

    def knapspec(self) -> KnapSpec:
        made = KnapSpec(LAYERS, "m")
        vars(made).update(clock=lambda: self.now, _updated=self.now)
        made.sets_of_weights, made.pass_times = self.propose, lambda: self.times
        made.prepare(self, None)
        return made

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


def test_proposals_have_the_right_size_and_spare_protected_sublayers() -> None:
    space = BitSearch(LAYERS, 7, "m", protected=[0, 1, 18])
    for propose in (space.uniform, space.random, space.bayesian):
        for value in range(5):
            skip = propose()
            assert len(skip) == 7 and not {0, 1, 18} & set(skip.sublayers) and skip.model == "m"
            space.register([skip], [value])
    with pytest.raises(ValueError, match="18 sublayers cannot be skipped: 17 of 20 may be"):
        BitSearch(LAYERS, 18, "m", protected=[0, 1, 18])


def test_bayesian_proposals_find_better_sets_than_chance() -> None:
    """They close most of the gap that random search leaves to the best set."""
    gains = []
    for seed in range(3):
        traffic = Traffic(seed=seed, luck=0.0)
        best = traffic.true(SkipSet.of_sublayers(np.argsort(traffic.importance)[:6], LAYERS))
        space, other = BitSearch(LAYERS, 6), BitSearch(LAYERS, 6)
        space.rng, other.rng = np.random.default_rng(seed), np.random.default_rng(seed + 100)
        for tried in range(60):
            skip = space.random() if tried < 10 else space.bayesian()
            space.register([skip], traffic([skip]))
        assert len(space.values) == 60, "a set was proposed twice"
        by_chance = max(traffic.true(other.random()) for _ in range(60))
        gains.append((max(map(traffic.true, space.values)) - by_chance) / (best - by_chance))
    assert np.mean(gains) > 0.5, gains


def test_swift_is_not_fooled_by_luck_and_ends_with_a_good_set_or_when_nothing_better_is_found() -> None:
    """With scores of a 32-token window, a set no better in truth seldom replaces the incumbent."""
    traffic = Traffic(0.05, luck=0.08, equal=True)
    policy = traffic.swift(patience=10**6)
    assert sum(policy.step() for _ in range(100)) < 0.2 * len(traffic.calls)
    for importance, most in ((0.001, 30), (0.05, 100)):
        policy = Traffic(importance, luck=0.0, equal=True).swift(patience=60)
        while policy.searching:
            policy.step()
        assert policy.candidates <= most and (policy.matchness > 0.95) == (importance < 0.01)


@pytest.mark.parametrize("seconds", [0.001, 0.25])
def test_knapspec_finds_a_set_of_about_the_most_tokens_per_time(seconds: float) -> None:
    """Also where a search is too slow to skip more than a few sublayers at once."""
    found = []
    for seed in range(5):
        traffic = Traffic(seed=seed, seconds=seconds)
        policy = traffic.knapspec()
        assert policy.max_lengths(np.array([7, 8], np.int32)).tolist() == [0, 0], "nothing is drafted at first"
        for _ in range(600):
            before = policy.incumbent
            assert policy.step() == (policy.incumbent != before)
        assert policy.sets == {"knapspec": policy.incumbent} and policy.max_lengths(np.zeros(2, np.int32)) is None
        plain = 1 / times().verify(1)
        found.append((traffic.rate(policy.incumbent) - plain) / (traffic.best() - plain))
    assert np.median(found) > 0.9 and min(found) > 0.8, found


def test_knapspec_follows_what_sublayers_take() -> None:
    """As context grows, attention costs more, and more of it is skipped; weights are the times' ratio."""
    traffic = Traffic(0.03, equal=True)
    policy = traffic.knapspec()
    skipped = []
    for attention, mlp, weights in ((0.25, 1.0, (1, 4)), (4.0, 1.0, (4, 1))):
        traffic.times = times(attention, mlp)
        for _ in range(400):
            policy.step()
        assert traffic.weights[-1] == weights
        skipped.append((len(policy.incumbent.attention), len(policy.incumbent.mlp)))
    assert skipped[0][0] < skipped[0][1] and skipped[1][0] > skipped[1][1]


def test_knapspec_never_drafts_with_what_does_not_pay_and_searches_nothing_without_times() -> None:
    traffic = Traffic(0.25, equal=True)
    policy, traffic.times = traffic.knapspec(), None
    assert not any(policy.step() for _ in range(10)) and not traffic.spent
    traffic.times = times(verify=12.0)
    assert traffic.best() < 1.02 / traffic.times.verify(1)
    for _ in range(300):
        policy.step()
    assert not policy.incumbent and policy.candidates > 20


@pytest.mark.parametrize("name", ["swift", "knapspec"])
@pytest.mark.parametrize(("share", "seconds"), [(0.01, 0.002), (0.05, 0.2)])
def test_a_search_takes_its_share_of_serving_time(name: str, share: float, seconds: float) -> None:
    """In batches of less than a second, once it is known what a set takes; none without text."""
    traffic = Traffic(seconds=seconds)
    endless = {"patience": 10**6, "most": 10**6, "stop_score": 1.0}
    policy: OnlineSearch = traffic.knapspec() if name == "knapspec" else traffic.swift(**endless)
    policy.share = share
    traffic.now += 10.0
    assert policy.search(None, policy.incumbent) is None and not traffic.spent
    found, step = [], make_step(["r"], [[1]])
    for _ in range(15000):
        traffic.now += 0.03
        found.append(policy.search(step, policy.incumbent))
    found = [new for new in found if new is not None]
    assert max(traffic.spent[2:]) <= 1.0 or name == "swift"
    assert 0.5 * share * traffic.now < sum(traffic.spent) < 1.02 * share * traffic.now + 1.0
    assert found and found[-1] == policy.sets[name] and policy.candidates > 30
