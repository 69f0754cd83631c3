"""KnapSpec: the dynamic programme against exhaustive search and a plain restatement; TPT."""

import itertools

import numpy as np
import pytest
import torch

from layerskip_plugin.calibrate import knapsack
from layerskip_plugin.calibrate.host_model import HostModel, Sample
from layerskip_plugin.calibrate.knapsack import ScoredSet
from layerskip_plugin.knapsack_search import integer_weights
from layerskip_plugin.pass_times import PassTimes
from layerskip_plugin.selection.knapsack import Choice, Knapsack, Plan
from layerskip_plugin.skip_set import SkipSet
from tests.support.models import VOCAB_SIZE, rough_model


@pytest.fixture(scope="module")
def host() -> HostModel:
    return HostModel(rough_model())


@pytest.fixture(scope="module")
def sample(host: HostModel) -> Sample:
    rng = np.random.default_rng(0)
    return host.sample([rng.integers(0, VOCAB_SIZE, 20).tolist() for _ in range(3)], 30)


def weight_of(skip: SkipSet, weights: tuple[int, int]) -> int:
    return len(skip.attention) * weights[0] + len(skip.mlp) * weights[1]


@pytest.mark.parametrize("weights", [(1, 1), (1, 3), (2, 1)])
def test_with_all_survivors_it_is_exhaustive_search(host: HostModel, sample: Sample, weights: tuple[int, int]) -> None:
    found = knapsack.search(host, sample, weights=weights, max_weight=99, prune=-2, survivors=1000)
    sets = [host.skip(np.flatnonzero(bits)) for bits in itertools.product([False, True], repeat=6)]
    agreement, final = host.agreement(sets, sample), sample.gather(lambda t: t.final)
    cosine = torch.cosine_similarity(host.final_states(sets, sample), final, dim=-1).mean(1)
    best: dict[int, tuple[float, float]] = {}
    for skip, *scores in zip(sets, agreement.tolist(), cosine.tolist(), strict=True):
        weight = weight_of(skip, weights)
        best[weight] = max(best.get(weight, (-1.0, -2.0)), tuple(scores))
    assert [c.weight for c in found] == sorted(best) == [weight_of(c.skip, weights) for c in found]
    for candidate in found:
        assert (candidate.agreement, candidate.cosine) == pytest.approx(best[candidate.weight], abs=1e-5)
    assert found[0].skip == host.skip([]) and found[0].agreement == 1


def test_one_survivor_is_the_recursion_of_the_paper(host: HostModel, sample: Sample) -> None:
    weights, max_weight, protected = (1, 2), 5, {3}
    table: dict[int, tuple[float, torch.Tensor, tuple[int, ...]]] = {0: (1.0, sample.states(0), ())}
    for i in range(host.sublayers):
        w, whole, new = weights[i % 2], sample.states(i + 1), {}
        for j in range(max_weight + 1):
            options = []
            if j in table:
                options.append((host.sublayer(i, table[j][1][None], sample)[0], table[j][2]))
            if i not in protected and j - w in table:
                options.append((table[j - w][1], (*table[j - w][2], i)))
            scored = [(float(torch.cosine_similarity(h, whole, dim=-1).mean()), h, s) for h, s in options]
            scored = [entry for entry in scored if entry[0] >= 0.3 or j == 0]
            if scored:
                new[j] = max(scored, key=lambda entry: entry[0])
        table = new
    found = knapsack.search(host, sample, weights=weights, max_weight=max_weight, protected=protected, prune=0.3)
    assert {c.weight: c.skip.sublayers for c in found} == {j: entry[2] for j, entry in table.items()}
    assert all(3 not in c.skip.sublayers for c in found)


def test_protected_sublayers_are_those_that_ruin_the_draft(host: HostModel, sample: Sample) -> None:
    agreement = host.agreement([host.skip([i]) for i in range(6)], sample)
    minimum = float(np.median(agreement)) + 1e-9
    assert knapsack.protected_sublayers(host, sample, minimum) == {i for i in range(6) if agreement[i] < minimum}
    assert 0 < len(knapsack.protected_sublayers(host, sample, minimum)) < 6


@pytest.mark.parametrize(
    ("times", "weights"), [((1.0, 1.0), (1, 1)), ((1.0, 2.6), (1, 3)), ((3.4, 1.0), (3, 1)), ((40.0, 1.0), (5, 1))]
)
def test_integer_weights(times: tuple[float, float], weights: tuple[int, int]) -> None:
    assert integer_weights(*times) == weights


def test_the_choice_is_that_of_most_tokens_per_time() -> None:
    sets = [SkipSet.of_sublayers(range(2, 2 + n), 10) for n in range(0, 12, 2)]
    times = PassTimes(1.0, 2.0, 1.5, lambda n: 31.5 + n)
    plain = 1 / 32.5
    for loss, pays in ((0.015, True), (0.06, False)):
        candidates = [ScoredSet(s, len(s), 1.0, 1 - loss * len(s)) for s in sets]
        best = knapsack.best_choice(candidates, times, trials=10**9, max_length=6)
        rates = {}
        for c in candidates[1:]:
            draft = (10 - len(c.skip.attention)) * 1.0 + (10 - len(c.skip.mlp)) * 2.0 + 1.5
            for d in range(1, 7):
                rates[c.skip, d] = sum(c.agreement**i for i in range(d + 1)) / (d * draft + 31.5 + d + 1)
        fastest, rate = max(rates.items(), key=lambda item: item[1])
        assert (rate > plain) == pays
        assert (best.skip, best.length or best.trial_length) == fastest and (best.length > 0) == pays
        assert best.rate == pytest.approx(max(rate, plain))
        careful = knapsack.best_choice(candidates, times, trials=10, max_length=6)
        assert not pays or careful.rate < best.rate, "few trials are not taken at their word"


def test_plan_goes_by_context() -> None:
    """Plain decoding is measured again where the policy measures; else its set is not even built."""
    slow, small, large = (SkipSet.of_sublayers(skipped, 4, "m") for skipped in ([5], [3], [2, 3, 5]))
    choices = (Choice(slow, 0, 5.0, trial_length=3), Choice(small, 2, 4.0), Choice(large, 6, 3.0))
    context = np.array([1, 199, 200, 799, 800, 9000], np.int32)
    for measured, length, sets in ((False, 0, [small, large]), (True, 3, [slow, small, large])):
        selection = Knapsack(Plan((100, 400, 1600), choices, "one CPU"), measured)
        assert selection.max_lengths(context).tolist() == [length, length, 2, 2, 6, 6]
        assert list(selection.sets.values()) == sets
        assert selection.choose(list("abcdef"), context)[2:] == [small, small, large, large]
    plain = Plan((100,), (Choice(SkipSet.empty(4, "m"), 0, 5.0),), "")
    assert [len(skip) for skip in Knapsack(plain).sets.values()] == [0]
