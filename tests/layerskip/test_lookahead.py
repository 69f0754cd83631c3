"""Fixed, confidence and adaptive lookahead against plain restatements of their rules."""

from __future__ import annotations

import numpy as np
import pytest
from lookahead_tools import RECIPE, Driver, cost, outcome

from layerskip_plugin.lookahead import Confidence, Disco, DraftVerify, Fixed, Lookahead
from layerskip_plugin.lookahead.disco import Classifier


def eager() -> list[Lookahead]:
    """One policy of each kind, set so that it would draft for ever."""
    shapes = ((12,), (12,), (12, 3), (3,), (3, 1), (1,))
    always = Classifier(tuple(np.ones(shape, np.float32) for shape in shapes), threshold=0.5, max_length=99)
    return [Fixed(99), Confidence(0.0), DraftVerify(0.0), Disco(always), cost({1: 1e-9}, {1: 1.0})]


@pytest.mark.parametrize("policy", eager(), ids=lambda p: type(p).__name__)
def test_the_longest_draft_allowed_is_never_exceeded_and_reached(policy: Lookahead) -> None:
    for longest in (1, 2, 7):
        assert Driver(policy).draft(["a", "b", "c"], longest, 0.999).tolist() == [longest] * 3


def test_confidence_keeps_the_token_that_it_stops_at() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        p = rng.random((5, 8), np.float32)
        drafted = Driver(Confidence(0.4)).draft(list("abcde"), 8, lambda position, rows, p=p: p[rows, position])
        expected = [next((i + 1 for i, x in enumerate(row) if x < 0.4), 8) for row in p]
        assert drafted.tolist() == expected


def output_distribution(target: np.ndarray, draft: np.ndarray, threshold: float, keep: bool) -> np.ndarray:
    """Exact law of the first two output tokens of a memoryless model, drafts of at most one token, p/q with residual.

    The draft token's own probability decides whether it is verified at all; `keep`: it always is.
    """
    law, policy = np.zeros((len(target), len(target))), Confidence(threshold)
    residual = np.maximum(target - draft, 0)
    residual = residual / residual.sum()
    for token in range(len(target)):
        policy.begin(["r"], RECIPE, 2)
        more = policy.should_continue(0, np.zeros(1, np.int32), np.array([[draft[token]]], np.float32), np.zeros(1))[0]
        if not more and not keep:
            law += draft[token] * np.outer(target, target)
            continue
        accept = min(1.0, target[token] / draft[token])
        law[token] += draft[token] * accept * target
        law += draft[token] * (1 - accept) * np.outer(residual, target)
    return law


def test_keeping_the_low_confidence_token_is_lossless_and_dropping_it_is_not() -> None:
    target, draft = np.array([0.6, 0.3, 0.1]), np.array([0.3, 0.2, 0.5])
    exact = np.outer(target, target)
    assert np.abs(output_distribution(target, draft, 0.4, keep=True) - exact).sum() < 1e-12
    assert np.abs(output_distribution(target, draft, 0.4, keep=False) - exact).sum() > 0.05


def test_draft_and_verify_follows_its_formula_per_request() -> None:
    rng = np.random.default_rng(1)
    policy = DraftVerify(0.6)
    policy.step, policy.inertia = 0.02, 0.8
    state = {name: [0.6, 0.9] for name in "abcdef"}
    for _ in range(60):
        ids = [str(x) for x in rng.permutation(list(state))[: rng.integers(1, 7)]]
        policy.begin(ids, RECIPE, 5)
        assert policy.thresholds == pytest.approx([state[name][0] for name in ids])
        drafted = rng.integers(0, 6, len(ids)).astype(np.int32)
        accepted = np.minimum(drafted, rng.integers(0, 6, len(ids))).astype(np.int32)
        order = rng.permutation(len(ids))
        policy.record_acceptance(outcome([ids[i] for i in order], drafted[order], accepted[order]))
        for name, d, a in zip(ids, drafted, accepted, strict=True):
            if not d:
                continue
            threshold, rate = state[name]
            rate = 0.5 * rate + 0.5 * a / d
            change = 0.02 if rate < 0.9 else 0.0 if d == 5 and a == d else -0.02
            state[name] = [min(1, max(0, 0.8 * threshold + 0.2 * (threshold + change))), rate]
    first = 0.6
    for name, (threshold, _) in state.items():
        policy.finish(name)
        first += 0.1 * (threshold - first)
    assert not policy.requests and policy.threshold == pytest.approx(first)
