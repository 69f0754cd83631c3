"""The source of drafts for SGLang over a made-up model: what it drafts, what it learns, and when it drafts nothing."""

from __future__ import annotations

import types
from typing import NamedTuple

import numpy as np
import pytest
import torch

from freedraft.config import ConfigError
from freedraft.engines.sglang.source import DraftStep, SourceContext
from layerskip_plugin.lookahead import Confidence, Cost, Fixed, Prices
from layerskip_plugin.selection.base import Static
from layerskip_plugin.selection.knapsack import Choice, Knapsack, Plan
from layerskip_plugin.selection.serving import Selector
from layerskip_plugin.served_times import ServedTimes
from layerskip_plugin.sglang import LayerSkipSource, check_arguments
from layerskip_plugin.skip_set import SkipSet

VOCAB, LAYERS = 32, 2
SETS = {
    "empty": SkipSet.empty(LAYERS),
    "half": SkipSet(LAYERS, frozenset({1}), frozenset()),
    "all": SkipSet(LAYERS, frozenset({0, 1}), frozenset({0, 1})),
}


def true_next(token):
    return (5 * token + 3) % VOCAB


class Candidates(NamedTuple):
    tokens: np.ndarray
    probabilities: np.ndarray
    entropy: np.ndarray | None


class Model:
    """Drafts rightly with all layers, after two thirds of the tokens with one skipped, never with all skipped. Where it
    is wrong it is unsure, and the right token is the second one."""

    rank, n_layers = 0, LAYERS

    def __init__(self):
        self.passes = []

    def stages(self, attention, mlp):
        return len(attention) + len(mlp)

    def agree(self, values):
        return np.asarray(values, np.int64)

    def window(self, batch, width):
        return types.SimpleNamespace(draft=self._draft)

    def _draft(self, skipped, rows, tokens, depth, candidates, entropy):
        self.passes.append((skipped, depth, rows.tolist(), tokens.tolist()))
        right = np.array([skipped == 0 or (skipped == 1 and t % 3 != 0) for t in tokens.tolist()])
        best = np.where(right, true_next(tokens), true_next(tokens) ^ 1)
        made = np.stack([(best + 7 * i) % VOCAB for i in range(candidates)], 1)
        if candidates > 1:
            made[:, 1] = np.where(right, best ^ 1, best ^ 1)
        sure = np.where(right, 0.9, 0.6)[:, None]
        rest = np.maximum(1 - sure, 0) * 0.5 ** np.arange(1, candidates)
        p = np.concatenate([sure, rest], 1).astype(np.float32)
        return Candidates(made.astype(np.int32), p, np.ones(len(rows), np.float32) if entropy else None)


class Engine:
    """Verifies what the source drafts, greedily, as the worker does."""

    def __init__(self, lookahead, times=None, *, tree=True, nodes=6, sets=SETS):
        self.model = Model()
        self.nodes = nodes
        context = SourceContext(VOCAB, nodes, 4, tuple(range(1, nodes + 1)), None, None)
        selector = sets if isinstance(sets, Selector) else Selector(Static(sets))
        self.source = LayerSkipSource(context, self.model, selector, lookahead, times or ServedTimes(0.5), tree=tree)
        self.text, self.gained = {}, {}
        self.steps = 0

    def add(self, name, first, skip_set=None):
        self.text[name], self.gained[name] = [first], [first]
        parameters = types.SimpleNamespace(custom_params={"skip_set": skip_set} if skip_set else None)
        self.requests = getattr(self, "requests", {})
        self.requests[name] = types.SimpleNamespace(rid=name, sampling_params=parameters)
        self.source.begin(name, np.array([first], np.int32))

    def step(self, names):
        """One step of these requests; their chains as they were drafted."""
        self.steps += 1
        width = self.source.width(len(names))
        tokens = [t for name in names for t in self.gained[name]]
        offsets = np.cumsum([0, *[len(self.gained[name]) for name in names]])
        lengths = torch.tensor([len(self.text[name]) - 1 for name in names])
        batch = types.SimpleNamespace(reqs=[self.requests[name] for name in names], seq_lens_cpu=lengths)
        step = DraftStep(names, np.array(tokens, np.int32), offsets, batch, undisturbed=True)
        tree = self.source.draft(step, width)
        tree.check()
        for b, name in enumerate(names):
            assert tree.tokens[b, 0] == self.text[name][-1]
            at, new = 0, []
            while True:
                new.append(int(true_next(tree.tokens[b, at])))
                below = [
                    i for i in range(1, tree.counts[b]) if tree.parents[b, i] == at and tree.tokens[b, i] == new[-1]
                ]
                if not below:
                    break
                at = below[0]
            self.text[name] += new
            self.gained[name] = new
        return tree


def text(first, length):
    out = [first]
    while len(out) < length:
        out.append(int(true_next(out[-1])))
    return out


@pytest.mark.parametrize("tree", [True, False], ids=["tree", "chain"])
def test_what_is_learnt_is_what_was_accepted(tree):
    """`observe` gets the accepted part of each chain, also when a sibling was accepted in its place, when rows change
    places and when a request is gone."""
    policy = Fixed(3)
    seen = []
    policy.observe = lambda ids, drafted, accepted: seen.append(
        dict(zip(ids, zip(drafted, accepted, strict=True), strict=True))
    )
    engine = Engine(policy, tree=tree)
    for name, first, chosen in (("a", 1, "empty"), ("b", 2, "half"), ("c", 3, "all"), ("d", 4, "no such set")):
        engine.add(name, first, chosen)
    orders = [["a", "b", "c", "d"], ["d", "b", "a", "c"], ["c", "a", "b"], ["b", "a", "c"], ["a", "b", "c"]]
    for order in orders:
        before = {name: len(engine.text[name]) for name in order}
        chains = {}
        tree_made = engine.step(order)
        for row, name in enumerate(order):
            drafted = int(engine.source._last.drafted[row])
            assert drafted == 3
            chains[name] = engine.source._last.tokens[row, :drafted, 0].tolist()
            assert tree_made.tokens[row, 1:4].tolist() == chains[name]
        expected = {}
        for name in order:
            new = engine.text[name][before[name] :]
            same = [x == y for x, y in zip(chains[name], new[:-1], strict=False)]
            expected[name] = (3, int(np.cumprod(same).sum()) if same else 0)
        engine.expected = expected
        seen.clear()
        engine.source._observe(
            DraftStep(
                order,
                np.array([t for n in order for t in engine.gained[n]], np.int32),
                np.cumsum([0, *[len(engine.gained[n]) for n in order]]),
                None,
            )
        )
        assert seen == [expected]
        assert expected["a"] == (3, 3) and expected["c"] == (3, 0)
    for name in "abcd":
        assert engine.text[name] == text(engine.text[name][0], len(engine.text[name]))
    if tree:
        assert len(engine.text["c"]) > len(orders) + 1, "a sibling beside a wrong token was never accepted"


def test_each_skip_set_runs_a_pass_of_its_own():
    engine = Engine(Confidence(0.7))
    for name, first, chosen in (("a", 1, "empty"), ("b", 2, "half"), ("c", 3, "empty"), ("d", 4, None)):
        engine.add(name, first, chosen)
    engine.step(["a", "b", "c", "d"])
    first = [(skipped, rows) for skipped, depth, rows, _ in engine.model.passes if depth == 0]
    assert first == [(0, [0, 2, 3]), (1, [1])]
    # Only who is sure goes on; the token that it was not sure of is kept and verified.
    for _, depth, rows, tokens in engine.model.passes:
        for row, token in zip(rows, tokens, strict=True):
            if depth:
                made = engine.source._last
                assert made.tokens[row, depth - 1, 0] == token
                assert made.probabilities[row, depth - 1, 0] >= 0.7
    engine.source.finish(["a", "b", "c", "d", "e"])
    assert not len(engine.source.selector)


def priced(draft, **times):
    return Cost(Prices.of_times({1: draft, 4: draft}, {1: 1.0, 24: 1.1}, **times))


def test_set_and_length_follow_the_context():
    """A plan of two sets with a stretch of plain decoding between them; requests of all three in one batch."""
    choices = Choice(SETS["half"], 2, 1.0), Choice(SETS["empty"], 0, 1.0), Choice(SETS["empty"], 3, 1.0)
    plan = Plan((10, 40, 160), choices, "here")
    engine = Engine(Fixed(5), sets=Selector(Knapsack(plan)))
    for name, first in (("a", 1), ("b", 2), ("c", 4)):
        engine.add(name, first)
    engine.text["b"] += [0] * 30 + [2]
    engine.text["c"] += [0] * 100 + [4]
    seen = set()
    for _ in range(120):
        before = {name: int(plan.at(np.array([len(engine.text[name])]))[0]) for name in "abc"}
        engine.model.passes.clear()
        engine.step(["a", "b", "c"])
        drafted = engine.source._last.drafted.tolist()
        assert drafted == [(2, 0, 3)[before[name]] for name in "abc"]
        for skipped, _, rows, _ in engine.model.passes:
            assert all(skipped == (1, None, 0)[before["abc"[row]]] for row in rows)
        seen.add(before["a"])
    assert seen == {0, 1, 2}


def test_stops_where_it_cannot_pay_and_goes_on_where_it_can():
    known = ServedTimes(0.5)
    for batch in (1, 2):
        for _ in range(3):
            known.note_step(batch, batch, 1.0)
    paying = Engine(priced(0.2), known, sets={"empty": SETS["empty"]})
    paying.add("a", 1)
    widths = [paying.source.width(1) for _ in range(100)]
    assert widths.count(1) <= 6, "only now and then a plain step, to know what one takes"
    assert 1 in widths

    losing = Engine(priced(0.5), known, tree=False, sets={"all": SETS["all"]})
    losing.add("a", 1)
    for _ in range(100):
        losing.step(["a"])
    passes = len(losing.model.passes)
    assert passes > 0
    for _ in range(1000):
        losing.step(["a"])
    assert len(losing.model.passes) - passes <= 10
    assert losing.text["a"] == text(1, 1101)


def test_plain_steps_first():
    """Nothing is drafted by price before plain decoding has one."""
    engine = Engine(priced(0.2), sets={"empty": SETS["empty"]})
    engine.add("a", 1)
    for _ in range(4):
        engine.step(["a"])
    assert not engine.model.passes
    engine.step(["a"])
    assert engine.model.passes


def test_sets_must_be_of_this_model():
    with pytest.raises(ValueError, match="of 3 layers"):
        Engine(Fixed(2), sets={"other": SkipSet.empty(3)})


def test_several_ranks_are_refused():
    with pytest.raises(ConfigError, match="--tp-size 1"):
        check_arguments(types.SimpleNamespace(tp_size=2))
