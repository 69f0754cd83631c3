"""Lookahead policies in the method: longest drafts, thresholds, and the rule of Draft & Verify restated."""

from __future__ import annotations

import numpy as np
import pytest
from lookahead_tools import RECIPE, outcome

from layerskip_plugin.lookahead.base import Confidence, DraftVerify, Fixed, Lookahead
from layerskip_plugin.lookahead.disco import Classifier, Disco
from tests.support.simulated import Passes, Text

SHAPES = ((12,), (12,), (12, 3), (3,), (3, 1), (1,))
ALWAYS = Classifier(tuple(np.ones(shape, np.float32) for shape in SHAPES), threshold=0.5, max_length=99)


def served(lookahead: Lookahead | None, longest: int) -> Passes:
    """Steps and passes that take hardly anything beside a step without drafts."""
    return Passes(lambda batch, tokens: 0.02, lambda requests: 1e-6, most=longest, lookahead=lookahead)


@pytest.mark.parametrize("policy", [Fixed(99), Confidence(0.0), DraftVerify(0.0), Disco(ALWAYS), None], ids=str)
def test_the_longest_draft_allowed_is_never_exceeded_and_reached(policy: Lookahead | None) -> None:
    for longest in (1, 2, 7):
        assert served(policy, longest).run(3, Text(1.0, 0.999), 30)[:, 2].max() == 3 * longest


def test_confidence_keeps_the_token_that_it_stops_at() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        p = rng.random((5, 8), np.float32)
        engine = served(Confidence(0.4), 8)
        engine.run(5, Text(0.5, lambda position, rows, p=p: p[rows, position]), 1)
        assert engine.drafted.tolist() == [next((i + 1 for i, x in enumerate(row) if x < 0.4), 8) for row in p]


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
