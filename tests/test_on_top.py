"""A method on top of another one: whose tokens are verified, and what each hears of it."""

from typing import Any

import numpy as np
import pytest

from freedraft.config import ConfigError, PluginOptions
from freedraft.cost.policies import make_controller
from freedraft.draft import DraftBatch
from freedraft.guarded_method import GuardedMethod
from freedraft.method import Method, MethodSpec
from freedraft.on_top import OnTop, continued, on_top
from freedraft.step import EngineContext, Step
from layerskip_plugin.method import SPEC as LAYERSKIP
from sssd_plugin.method import SPEC as SSSD
from tests.support.steps import chains, make_step


def random_chains(random: np.random.Generator, batch: int) -> DraftBatch:
    """Of few tokens, so that some begin alike."""
    scores = [np.sort(random.random(random.integers(6)))[::-1].tolist() for _ in range(batch)]
    draft = chains(scores, int(random.integers(1, 200)))
    draft.tokens[:, 1:] = random.integers(2, size=draft.tokens[:, 1:].shape)
    draft.tokens[:, 0] = 7
    return draft


def test_a_chain_goes_on_where_it_begins_with_all_of_the_other() -> None:
    random = np.random.default_rng(1)
    longer = parted = 0
    for _ in range(300):
        below, above = random_chains(random, 5), random_chains(random, 5)
        both = continued(below, above)
        both.check()
        for b in range(5):
            first, other, found = below.chain(b), above.chain(b), both.chain(b)
            goes_on = other[: len(first)] == first and len(other) > len(first)
            assert found == (other if goes_on else first)
            n, m = len(first), len(other)
            np.testing.assert_array_equal(both.kinds[b, 1 : n + 1], below.kinds[b, 1 : n + 1])
            np.testing.assert_array_equal(both.scores[b, : n + 1], below.scores[b, : n + 1])
            if goes_on:
                tail, given = slice(n + 1, m + 1), below.scores[b, n] / above.scores[b, n]
                np.testing.assert_array_equal(both.kinds[b, tail], above.kinds[b, tail])
                np.testing.assert_allclose(both.scores[b, tail], given * above.scores[b, tail], rtol=1e-5)
            longer, parted = longer + goes_on, parted + (not goes_on)
    assert longer > 100 and parted > 100


class Noting(Method):
    """Drafts the same tokens for everyone, and notes what was verified of them."""

    tokens = (11, 12, 13, 14, 15)

    def __init__(self, options: Any, context: EngineContext, controller: Any = None) -> None:
        super().__init__(options, context, controller or make_controller(context, "fixed"), "noting")
        self.verified: list[int] = []
        self.asked: list[int] = []

    def update(self, step: Step) -> None:
        self.verified = step.drafted.tolist()

    def propose(self, step: Step, max_draft_len: int) -> DraftBatch:
        self.asked.append(max_draft_len)
        draft = chains([[0.9] * min(max_draft_len, len(self.tokens))] * step.batch_size)
        draft.tokens[:, 1:] = self.tokens[: draft.max_nodes - 1]
        return draft

    def prepare(self, model: Any) -> None:
        self.model = model


class Above(PluginOptions):
    shape: str = "chain"


class Below(PluginOptions):
    shape: str = "chain"


def make() -> tuple[GuardedMethod, OnTop]:
    above = MethodSpec("up", f"{__name__}:Noting", Above)
    below = MethodSpec("down", f"{__name__}:Noting", Below, runs_model=True)
    spec = on_top(above, below)
    options, most = spec.options.parse({}).engine_tokens(2)  # type: ignore[attr-defined]
    context = EngineContext(max_draft_tokens=5, lengths=(5,), device="cpu")
    assert most == 15 and spec.runs_model
    guarded = GuardedMethod(spec, options, context)
    return guarded, guarded.method  # type: ignore[return-value]


def test_each_hears_what_was_verified_of_its_own() -> None:
    guarded, method = make()
    draft = guarded.step(make_step(list("abcd"), [[1]] * 4, capacities=[5, 5, 5, 1]))
    assert draft is not None and [draft.chain(b) for b in range(4)] == [[*Noting.tokens]] * 3 + [[11]]
    assert method.below.asked == [2] and method.above.asked == [5]  # type: ignore[attr-defined]
    # All right; right up to the third; wrong at the second; and one token only.
    texts = [[11, 12, 13, 14, 15, 9], [11, 12, 13, 9], [11, 9], [11, 9]]
    guarded.step(make_step(list("abcd"), texts, drafted=[5, 5, 5, 1], capacities=[0] * 4))
    assert method.below.verified == [2, 2, 2, 1], "of its own"  # type: ignore[attr-defined]
    assert method.above.verified == [5, 5, 0, 0], "where all before was right"  # type: ignore[attr-defined]
    guarded.settle()
    lengths = {n: method.metrics.head_lengths("down", str(n))._value.get() for n in range(4)}
    assert lengths == {0: 0, 1: 2, 2: 2, 3: 0}, "a miss of the tail is none of the drafter below"
    assert (method.metrics.drafted._value.get(), method.metrics.accepted._value.get()) == (10, 8)
    # A request that was not drafted for, and one that has gone.
    guarded.step(make_step(["e", "a"], [[1], [2]], drafted=[0, 0]))
    assert method.below.verified == [0, 0]  # type: ignore[attr-defined]


def test_options_of_both_methods() -> None:
    spec = on_top(SSSD, LAYERSKIP)
    assert spec.name == "sssd+layerskip" and spec.runs_model and spec.schedule is not None
    options = spec.options.parse({"window": 64, "isolation": "strict", "lookahead": "fixed", "length": 9})
    own, most = options.engine_tokens(4)  # type: ignore[attr-defined]
    assert most == 15 and own.of(LAYERSKIP).length == 4 and own.of(LAYERSKIP).window == 64
    assert own.of(SSSD).isolation == "strict" and own.of(SSSD).shape == own.of(LAYERSKIP).shape == "chain"
    assert spec.options.parse({"ngram_tokens": 30}).engine_tokens(20)[1] == 30  # type: ignore[attr-defined]
    for wrong, words in (
        ({"ngram_tokens": 3}, "'ngram_tokens' must be at least the 5 tokens of 'layerskip', not 3"),
        ({"ngram_tokens": 64}, "'ngram_tokens' should be less than or equal to 63"),
        ({"shape": "tree"}, "'shape' should be 'chain'"),
    ):
        with pytest.raises(ConfigError, match=words):
            spec.options.parse(wrong).engine_tokens(5)  # type: ignore[attr-defined]
