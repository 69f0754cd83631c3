"""KNN-SSD: anchors, routing with a floor, sets per request."""

import itertools

import numpy as np
import pytest

from layerskip_plugin.calibrate.knn import clusters, fit
from layerskip_plugin.selection.knn import Domains, Knn, unit
from layerskip_plugin.skip_set import SkipSet

WIDTH = 24


def states(center: np.ndarray, n: int, seed: int) -> np.ndarray:
    """Hidden states of a domain: a direction of its own, and a large part that all prompts share."""
    rng = np.random.default_rng(seed)
    return (40 + center + 0.25 * rng.standard_normal((n, WIDTH))).astype(np.float32)


def centers(count: int) -> list[np.ndarray]:
    return list(2 * np.eye(WIDTH)[:count])


def fitted(count: int = 3) -> Domains:
    sets = [SkipSet.of_sublayers([i], 8, "m") for i in range(count + 1)]
    hidden = [states(c, 25, i) for i, c in enumerate(centers(count))]
    return fit(hidden, [f"d{i}" for i in range(count)], sets)


def test_held_out_prompts_find_their_domain_and_others_the_global_set() -> None:
    domains = fitted()
    for i, center in enumerate(centers(3)):
        assert (domains.route(states(center, 40, 100 + i)) == i).mean() > 0.95
    strangers = states(2 * np.eye(WIDTH)[10], 40, 7)
    assert (domains.route(strangers) == 3).all()
    assert len(domains.anchors) == 30 and np.allclose(np.linalg.norm(domains.anchors, axis=1), 1, atol=1e-5)


def test_a_request_keeps_the_set_of_its_domain_until_it_ends() -> None:
    domains = fitted()
    policy, none = Knn(domains), np.zeros(1, np.int32)
    for i, center in enumerate([*centers(3), 2 * np.eye(WIDTH)[10]]):
        policy.set_prompt_state(f"r{i}", states(center, 1, 3)[0])
    policy.begin("resumed", None)
    for _ in range(2):
        assert [policy.choose([f"r{i}"], none)[0] for i in range(4)] == list(domains.sets)
    assert policy.choose(["resumed"], none) == [domains.sets[-1]]
    policy.finish("r0")
    policy.finish("resumed")
    assert len(policy.requests) == 3


def test_anchors_are_the_states_nearest_to_the_centroid_as_in_equation_2() -> None:
    """Of all subsets of a domain's states, those of the least sum of distances."""
    hidden = [states(center, 6, i) for i, center in enumerate(centers(2))]
    domains = fit(hidden, ["a", "b"], [SkipSet.empty(8)] * 3, max_anchors=2, anchors="nearest")
    for i, rows in enumerate(hidden):
        rows = unit(rows - domains.center)
        pairs = itertools.combinations(range(len(rows)), 2)
        best = min(pairs, key=lambda pair: np.linalg.norm(rows[list(pair)] - rows.mean(0), axis=1).sum())
        found = domains.anchors[domains.domain == i]
        assert sorted(found.tolist()) == sorted(rows[list(best)].tolist())


def test_equal_prompts_are_one_anchor() -> None:
    same = np.repeat(states(centers(3)[0], 1, 0), 6, 0)
    domains = fit([same, states(centers(3)[1], 6, 1)], ["a", "b"], [SkipSet.empty(8)] * 3)
    assert (domains.domain == 0).sum() == 1


def test_clusters_of_a_log_are_its_domains() -> None:
    """Three kinds of prompts in any order, and one that is like none of them."""
    sizes = (12, 9, 6)
    kinds = [states(center, n, i) for i, (center, n) in enumerate(zip(centers(3), sizes, strict=True))]
    log = np.concatenate([*kinds, states(6 * np.eye(WIDTH)[10], 1, 9)])
    order = np.random.default_rng(0).permutation(len(log))
    kind = np.repeat(np.arange(4), (*sizes, 1))[order]
    found = clusters(log[order], 4)
    assert [len(members) for members in found] == list(sizes), "the largest first, the stranger in none"
    assert [set(kind[members]) for members in found] == [{0}, {1}, {2}]
    for wrong, says in ((1, "at least 2"), (20, "at least 40 prompts")):
        with pytest.raises(ValueError, match=says):
            clusters(log, wrong)
