"""SWIFT, Self-SD and their proposals, on made-up models whose best set is known."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from layerskip_plugin.calibrate import bayesian
from layerskip_plugin.pass_times import PassTimes
from layerskip_plugin.selection.bit_search import BitSearch
from layerskip_plugin.selection.online_search import Swift
from layerskip_plugin.skip_set import SkipSet

LAYERS = 12


class Traffic:
    """Matchness falls with the importance of what is skipped; each window adds luck of its own to each set."""

    def __init__(self, luck: float = 0.0, seed: int = 0) -> None:
        rng = np.random.default_rng(seed)
        self.importance = rng.permutation(np.geomspace(0.001, 0.25, 2 * LAYERS))
        self.luck, self.rng, self.calls = luck, rng, []

    def true(self, skip: SkipSet) -> float:
        return float(np.prod(1 - self.importance[list(skip.sublayers)]))

    def __call__(self, skips: Sequence[SkipSet]) -> np.ndarray:
        self.calls.append(list(skips))
        return np.array([self.true(s) for s in skips]) + self.luck * self.rng.standard_normal(len(skips))


class Clock:
    """Time that only passes when a set is scored."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_proposals_have_the_right_size_and_spare_protected_sublayers() -> None:
    space = BitSearch(LAYERS, "m", protected=[0, 1, 22], size=7, seed=0)
    traffic = Traffic()
    uniform = space.uniform()
    space.register([uniform], [0.5])
    assert len({s // 6 for s in uniform.sublayers}) >= 3
    for propose in (space.uniform, space.random, space.bayesian, lambda: space.mutated(uniform)):
        for _ in range(5):
            skip = propose()
            assert len(skip) == 7 and not {0, 1, 22} & set(skip.sublayers) and skip.model == "m"
            space.register([skip], traffic([skip]))
    changed = space.mutated(uniform)
    assert len(set(changed.sublayers) & set(uniform.sublayers)) == 6
    with pytest.raises(ValueError, match="22 sublayers cannot be skipped: 21 of 24 may be"):
        space.resize(22)


def test_points_are_learned_as_they_were_evaluated_and_restored() -> None:
    space, again = BitSearch(LAYERS, size=5, seed=1), BitSearch(LAYERS, size=5, seed=1)
    for _ in range(6):
        skip = space.random()
        space.register([skip], [0.1 * len(space.values)])
    space.register([skip], [1.0])
    assert space.values[skip] == pytest.approx((0.5 + 1.0) / 2)
    again.restore(space.state())
    assert again.values == space.values and again.best == space.best


def test_self_sd_finds_better_sets_than_random_search() -> None:
    gains = []
    for seed in range(3):
        traffic = Traffic(seed=seed)
        space = BitSearch(LAYERS, size=6, seed=seed)
        found = bayesian.search(traffic, space, 60)
        other = BitSearch(LAYERS, size=6, seed=seed + 100)
        by_chance = max((other.random() for _ in range(60)), key=traffic.true)
        gains.append(traffic.true(found) - traffic.true(by_chance))
        assert len(space.values) == sum(len(c) for c in traffic.calls) == 60
    assert np.mean(gains) > 0.02


def test_self_sd_goes_on_from_what_was_evaluated() -> None:
    traffic, space = Traffic(), BitSearch(LAYERS, size=6)
    bayesian.search(traffic, space, 20)
    before = len(traffic.calls)
    bayesian.search(traffic, space, 20)
    assert len(traffic.calls) == before
    bayesian.search(traffic, space, 25)
    assert sum(len(c) for c in traffic.calls) == 25


def test_self_sd_minimises_time_per_token() -> None:
    """Attention is dear here: the fastest set skips it rather than MLP."""
    times = PassTimes(attention=3.0, mlp=1.0, head=20.0, verify=lambda n: 68.0 + 0.1 * n)
    traffic = Traffic()
    traffic.importance[:] = 0.04
    space = BitSearch(LAYERS, seed=0)
    found = bayesian.search(traffic, space, 60, times)
    sets = [SkipSet(LAYERS, frozenset(range(a)), frozenset(range(m))) for a in range(13) for m in range(13)]
    fastest = min(bayesian.seconds_per_token(s, traffic.true(s), times) for s in sets)
    assert len(found.attention) > len(found.mlp)
    assert bayesian.seconds_per_token(found, traffic.true(found), times) < 1.02 * fastest


def swift(traffic: Traffic, clock: Clock | None = None, cost: float = 1.0, **options: object) -> Swift:
    clock = clock or Clock()

    def evaluate(skips: Sequence[SkipSet]) -> np.ndarray:
        clock.now += cost * len(skips)
        return traffic(skips)

    settings = {"ratio": 0.25, "beta": 10, "patience": 60, "seed": 0} | options
    return Swift(LAYERS, evaluate, "m", clock=clock, **settings)  # type: ignore[arg-type]


def test_swift_scores_its_uniform_start_before_anything_else() -> None:
    traffic = Traffic()
    policy = swift(traffic)
    start = policy.incumbent
    assert start == BitSearch(LAYERS, "m", size=6).uniform()
    assert not policy.step(0.5) and traffic.calls == [[start]]


def test_swift_scores_its_incumbent_again_in_every_batch_and_improves() -> None:
    traffic = Traffic()
    policy = swift(traffic, patience=100)
    start, incumbents = policy.incumbent, [policy.incumbent]
    while policy.ratio == 0.25 and len(incumbents) < 300:
        before = len(traffic.calls)
        policy.step(9.0)
        for batch in traffic.calls[before:]:
            assert len(set(batch)) == len(batch)
        if len(traffic.calls) > before:
            assert traffic.calls[before][0] == incumbents[-1]
        incumbents.append(policy.incumbent)
    incumbents = [skip for skip in incumbents if len(skip) == 6]
    true = [traffic.true(s) for s in incumbents]
    assert all(b >= a - 1e-12 for a, b in itertools.pairwise(true)), "no luck: it never gets worse"
    assert true[-1] > traffic.true(start) + 0.1


def test_swift_is_not_fooled_by_luck() -> None:
    """With scores of a 32-token window, a set no better in truth seldom replaces the incumbent."""
    traffic = Traffic(luck=0.08)
    traffic.importance[:] = 0.05
    policy = swift(traffic, patience=10**6)
    changes = sum(policy.step(9.0) for _ in range(60))
    batches = len(traffic.calls)
    assert changes < 0.2 * batches


@pytest.mark.parametrize("budget", [3.0, 5.0, 20.0])
def test_swift_keeps_to_its_time(budget: float) -> None:
    clock = Clock()
    policy = swift(Traffic(), clock, patience=10**6, beta=10**6)
    policy.step(budget)
    for _ in range(20):
        before = clock.now
        policy.step(budget)
        assert clock.now - before <= budget + 1e-9
    assert clock.now > 15 * min(budget, 8.0)


def test_swift_finds_the_best_of_few_sets() -> None:
    """A model of four layers has six sets of the right size."""
    importance = np.array([0.5, 0.5, 0.3, 0.2, 0.02, 0.1, 0.5, 0.5])

    def evaluate(skips: Sequence[SkipSet]) -> np.ndarray:
        return np.array([float(np.prod(1 - importance[list(s.sublayers)])) for s in skips])

    policy = Swift(4, evaluate, ratio=0.25, protected=(0, 1, 6, 7), beta=3, patience=40, seed=0, clock=Clock())
    seen = set()
    for _ in range(200):
        policy.step(1.0)
        if len(policy.incumbent) == 2:
            seen.add(policy.incumbent.sublayers)
    assert (4, 5) in seen and not policy.searching


def test_swift_rests_and_begins_again_when_acceptance_falls() -> None:
    traffic = Traffic()
    policy = swift(traffic, patience=20)
    policy.space.skippable = policy.space.skippable[:20]
    while policy.searching:
        policy.step(50.0)
    calls, settled = len(traffic.calls), policy.incumbent
    policy.step(50.0)
    assert len(traffic.calls) == calls
    good, bad = np.array([8], np.int32), np.array([1], np.int32)
    for _ in range(60):
        policy.record_acceptance(["a"], good, good, settled)
    assert not policy.searching
    for _ in range(200):
        policy.record_acceptance(["a"], good, bad, settled)
    assert policy.searching
    policy.step(2.0)
    assert traffic.calls[calls][0] == settled


@pytest.mark.parametrize(("importance", "fewer"), [(0.3, True), (1e-4, False)])
def test_swift_moves_its_ratio(importance: float, fewer: bool) -> None:
    traffic = Traffic()
    traffic.importance[:] = importance
    policy = swift(traffic, patience=10)
    before = policy.ratio
    for _ in range(40):
        policy.step(50.0)
    assert (policy.ratio < before) if fewer else (policy.ratio > before)
    assert len(policy.incumbent) == round(policy.ratio * 2 * LAYERS)


def test_swift_keeps_its_set_over_a_change_of_ratio() -> None:
    """The set that was found grows or shrinks by a notch: its sublayers stay among those of the next one."""
    for matchness in (0.99, 0.1):
        swift = Swift(10, lambda skips, m=matchness: np.full(len(skips), m), ratio=0.3, patience=4, seed=1)
        before, sizes = swift.incumbent, [len(swift.incumbent)]
        swift.acceptance, swift.trials = 0.35, 200.0
        for _ in range(40):
            swift.step(1e9)
            now = swift.incumbent
            if len(now) != len(before):
                smaller, larger = sorted((set(before.sublayers), set(now.sublayers)), key=len)
                assert smaller < larger and len(larger) - len(smaller) == 1
                assert swift.trials == 0, "live acceptance was another set's"
                sizes.append(len(now))
            before = now
        assert len(sizes) > 2 and sizes == sorted(sizes, reverse=matchness < 0.5)
