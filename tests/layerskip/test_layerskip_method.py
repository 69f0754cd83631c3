"""The method over a made-up model: what it drafts, what it learns, and when it drafts nothing; SWIFT's trees."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lookahead_tools import KnownCosts

from freedraft.config import ConfigError
from freedraft.draft_model import Drafted
from freedraft.step import EngineContext
from layerskip_plugin.candidate_tree import candidate_tree, candidates_at, cut_to_width
from layerskip_plugin.lookahead.base import Confidence, FixedLength
from layerskip_plugin.lookahead.cost import Cost
from layerskip_plugin.lookahead.records import Verifications
from layerskip_plugin.method import LayerSkipMethod
from layerskip_plugin.options import LayerSkipOptions
from layerskip_plugin.rounds import Round
from layerskip_plugin.selection.base import Static
from layerskip_plugin.skip_set import SkipSet
from tests.support.simulated import MadeUpModel
from tests.support.steps import make_step

VOCAB, LAYERS, NODES = 32, 2, 6
SETS = {
    "empty": SkipSet.empty(LAYERS),
    "half": SkipSet(LAYERS, frozenset({1}), frozenset()),
    "all": SkipSet(LAYERS, frozenset({0, 1}), frozenset({0, 1})),
}
SHAPE = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": LAYERS,
         "num_attention_heads": 2, "vocab_size": VOCAB}  # fmt: skip
CONFIG = SimpleNamespace(**SHAPE, to_dict=lambda: SHAPE)


def true_next(token):
    return (5 * token + 3) % VOCAB


class Model(MadeUpModel):
    """Drafts rightly with all layers, after two thirds of the tokens with one skipped, never with all skipped. Where it
    is wrong it is unsure, and the right token is the second one."""

    n_layers = LAYERS

    def __init__(self, waits=False, trees=False):
        self.passes, self.waits, self.reads, self.trees = [], waits, [], trees

    def read(self, launched):
        self.reads.append(len(launched.tokens))
        return launched

    def launch(self, rows, tokens, position, count=1):
        drafted = []
        for i in range(count):
            drafted.append(self.run_one(rows, tokens, position + i))
            tokens = drafted[-1].tokens[:, 0]
        return Drafted(*(None if parts[0] is None else np.stack(parts) for parts in zip(*drafted, strict=True)))

    def run_one(self, rows, tokens, position):
        skipped, (candidates, entropy) = len(self.recipe), self.outputs
        self.passes.append((skipped, position, rows.tolist(), tokens.tolist()))
        right = np.array([skipped == 0 or (skipped == 1 and t % 3 != 0) for t in tokens.tolist()])
        best = np.where(right, true_next(tokens), true_next(tokens) ^ 1)
        made = np.stack([(best + 7 * i) % VOCAB for i in range(candidates)], 1)
        if candidates > 1:
            made[:, 1] = best ^ 1
        sure = np.where(right, 0.9, 0.6)[:, None]
        rest = np.maximum(1 - sure, 0) * 0.5 ** np.arange(1, candidates)
        p = np.concatenate([sure, rest], 1).astype(np.float32)
        return Drafted(made.astype(np.int32), p, np.ones(len(rows), np.float32) if entropy else None)


class Engine:
    """Verifies what the method drafts, greedily. Steps take no time: what they cost is said, not measured."""

    def __init__(
        self, lookahead=None, *, shape="auto", chains=False, one_length=False, sets=SETS, costs=None, waits=False,
        **more,
    ):  # fmt: skip
        self.model = Model(waits, trees=not chains)
        self.widths = None if chains or one_length else tuple(range(1, NODES + 1))
        known = {"max_draft_tokens": NODES - 1, "widths": self.widths, "lengths": (NODES - 1,) if one_length else None}
        context = EngineContext(hf_config=CONFIG, vocab_size=VOCAB, page_size=8, **known)
        options = LayerSkipOptions(shape=shape, lookahead="fixed" if costs is None else "cost", **more)
        self.method = method = LayerSkipMethod(options, context)
        method.selection = Static(sets)
        method.use(sets.values())
        if costs is not None:
            known = KnownCosts(*costs)
            measured = method.measured
            measured.step_seconds, measured.pass_seconds = known.step_seconds, known.pass_seconds
            ticks = itertools.count()
            measured.clock = lambda: 0.001 * next(ticks)
            lookahead = Cost(measured, list(method.recipes.values()), NODES - 1, self.widths)
        method.lookahead = lookahead
        method.prepare(self.model)
        self.text, self.gained, self.drafted = {}, {}, {}
        self.previous = None

    def add(self, name, first, skip_set=None):
        self.text[name], self.gained[name], self.drafted[name] = [first], [first], 0
        self.method.begin(name, np.array([first], np.int32), None, {"skip_set": skip_set} if skip_set else {})

    def serve(self, steps, name):
        """The nodes of a request's draft in each of some steps."""
        return [int(self.step([name]).counts[0]) for _ in range(steps)]

    def as_step(self, names):
        gained, drafted, texts = ([of[name] for name in names] for of in (self.gained, self.drafted, self.text))
        step = {"capacities": NODES - 1, "trees": self.model.trees, "previous": self.previous}
        return make_step(names, gained, drafted=drafted, texts=texts, **step)

    def step(self, names):
        """One step of these requests; the draft."""
        tree = self.method.draft(self.as_step(names))
        tree.check()
        for b, name in enumerate(names):
            assert tree.tokens[b, 0] == self.text[name][-1]
            nodes = {(tree.parents[b, i], tree.tokens[b, i]): i for i in range(1, tree.counts[b])}
            new, at = [], 0
            while at is not None:
                new.append(int(true_next(tree.tokens[b, at])))
                at = nodes.get((at, new[-1]))
            self.text[name] += new
            self.gained[name], self.drafted[name] = new, int(tree.counts[b]) - 1
        self.previous = len(names), int(tree.counts.sum())
        return tree


@pytest.mark.parametrize("chosen", SETS)
@pytest.mark.parametrize("shape", ["tree", "tree of one length", "chain", "chain engine"])
def test_what_is_learnt_is_what_was_accepted(shape, chosen):
    """The policy hears of the accepted part of each chain, also when a sibling was accepted in its place, when rows
    change places and when a request is gone."""
    policy = FixedLength(3)
    seen = []
    policy.learn_outcome = lambda o: seen.append(
        {name: tuple(map(int, n)) for name, *n in zip(o.request_ids, o.verified, o.accepted, o.path, strict=True)}
    )
    one_length = shape == "tree of one length"
    engine = Engine(
        policy, shape="auto" if "tree" in shape else "chain", chains=shape == "chain engine", one_length=one_length
    )
    for name, first in (("a", 1), ("b", 2), ("c", 3), ("d", 4)):
        engine.add(name, first, chosen if name != "d" else "no such set")
    expected = None
    orders = [["a", "b", "c", "d"], ["d", "b", "a", "c"], ["c", "a", "b"], ["b", "a", "c"], ["a", "b", "c"]]
    for order in orders:
        before = {name: len(engine.text[name]) for name in order}
        tree = engine.step(order)
        assert not one_length or set(tree.counts.tolist()) == {NODES}, "siblings fill what is verified"
        if expected is not None:
            assert seen == [{name: expected[name] for name in expected if name in order}]
            if chosen != "half":
                assert expected["c"][:2] == ((3, 3) if chosen == "empty" else (3, 0))
        seen.clear()
        expected = {}
        for row, name in enumerate(order):
            new = engine.text[name][before[name] :]
            same = [x == y for x, y in zip(tree.tokens[row, 1:4], new[:-1], strict=False)]
            expected[name] = (3, int(np.cumprod(same).sum()), len(new) - 1)
    for text in engine.text.values():
        assert text[1:] == [true_next(token) for token in text[:-1]]
    if "tree" in shape:
        assert len(engine.text["c"]) > len(orders) + 1, "a sibling beside a wrong token was never accepted"


@pytest.mark.parametrize(
    ("policy", "chosen", "count"), [(FixedLength, "half", 4), (Confidence, "empty", 5), (Confidence, "half", None)]
)
def test_a_device_that_would_wait_is_read_back_once(policy, chosen, count):
    """Drafts are the same as with a look at every token; whoever ends earlier is not drafted on."""
    engines = [
        Engine(FixedLength(4) if policy is FixedLength else policy(), shape="chain", waits=waits)
        for waits in (False, True)
    ]
    for engine in engines:
        for name, first in (("a", 1), ("b", 2), ("c", 3)):
            engine.add(name, first, chosen)
    for _ in range(30):
        one, other = (engine.step(["a", "b", "c"]) for engine in engines)
        assert one.counts.tolist() == other.counts.tolist()
        assert all((one.tokens[b, :n] == other.tokens[b, :n]).all() for b, n in enumerate(one.counts))
    assert count is None or engines[1].model.reads == [count] * 30
    assert set(engines[0].model.reads) == {1}


@pytest.mark.parametrize(("widths", "kept"), [((1, 2, 4, 8), 4), (tuple(range(1, 9)), 3), ((1, 8), 8)])
def test_siblings_as_many_as_pay_at_the_widths_that_there_are(widths, kept):
    """Verification is as dear as the width that the longest chain needs: up to there siblings cost nothing."""
    made = Round(["a"], SETS["half"], depth=2, top_k=10)
    made.tokens[:], made.drafted[:] = np.arange(1, 21).reshape(1, 2, 10), 2
    made.probabilities[:], made.probabilities[:, :, 0] = 0.02, 0.6
    tree = candidate_tree(made, np.zeros(1, np.int32), 8)
    assert tree.counts[0] == 8
    prices = np.array(widths, np.float64)  # a token for each node
    cut_to_width(tree, np.array([2], np.int32), np.array(widths, np.int32), prices)
    assert tree.counts.tolist() == [kept]


def test_what_was_cut_off_is_not_judged():
    """An engine that verifies two of three drafted tokens says nothing of the third."""
    policy, seen = FixedLength(3), []
    policy.learn_outcome = lambda outcome: seen.append((outcome.verified.tolist(), outcome.accepted.tolist()))
    engine = Engine(policy, chains=True)
    engine.add("a", 1)
    chain = engine.method.draft(engine.as_step(["a"])).tokens[0, 1:4].tolist()
    engine.text["a"] += chain
    engine.gained["a"], engine.drafted["a"] = chain, 2  # two accepted, and the third as the model's own
    engine.method.update(engine.as_step(["a"]))
    assert seen == [([2], [2])]


def test_requests_with_different_sets_draft_with_the_most_frequent_one():
    engine = Engine(Confidence(0.7))
    for first, (name, chosen) in enumerate(zip("abcde", ("empty", "half", "half", None, "half"), strict=True), 1):
        engine.add(name, first, chosen)
    engine.step(list("abcde"))
    assert {skipped for skipped, *_ in engine.model.passes} == {1}
    assert engine.model.passes[0][2] == [0, 1, 2, 3, 4]
    # Only who is sure goes on; the token that it was not sure of is kept and verified.
    for _, depth, rows, tokens in engine.model.passes[1:]:
        for row, token in zip(rows, tokens, strict=True):
            made = engine.method._last
            assert made.tokens[row, depth - 1, 0] == token and made.probabilities[row, depth - 1, 0] >= 0.7
    engine.model.passes.clear()
    engine.step(["a", "d", "e"])
    assert {skipped for skipped, *_ in engine.model.passes} == {0}, "most of those that are left have another one"
    for name in "abcdef":
        engine.method.finish(name, None)
    assert not engine.method.selection.requests and not engine.method._running


@pytest.mark.parametrize("chosen", ["empty", "half"])
def test_requests_that_the_window_holds_are_drafted_for_only_where_sublayers_are_skipped(chosen):
    """Of 16 newest tokens and 4 sinks in pages of 8, 31 tokens read everything."""
    engine = Engine(FixedLength(3), chains=True, window=20, sinks=4)
    for name, length in (("held", 31), ("longer", 32)):
        engine.add(name, 1, chosen)
        while len(engine.text[name]) < length:
            engine.text[name].append(int(true_next(engine.text[name][-1])))
        engine.gained[name] = engine.text[name][-1:]
    assert (engine.step(["held", "longer"]).counts > 1).tolist() == [chosen == "half", True]


def test_recorded_verifications_have_prices(tmp_path):
    engine = Engine(costs=(0.2, {1: 1.0, 24: 1.1}), sets={"empty": SETS["empty"]}, record=tmp_path / "seen.npz")
    engine.add("a", 1)
    engine.serve(20, "a")
    engine.method.close()
    seen = Verifications.load(tmp_path / "seen.npz")
    assert len(seen) > 0
    assert seen.prices == pytest.approx((0.2, 0.1 / 23)), "a draft pass and a query token, in steps without drafts"


def test_models_that_are_refused():
    with pytest.raises(ValueError, match="of 3 layers"):
        Engine(FixedLength(2), sets={"other": SkipSet.empty(3)})
    unreadable = SimpleNamespace(**SHAPE, to_dict=dict)
    with pytest.raises(ConfigError, match="cannot price this model's steps"):
        LayerSkipMethod(LayerSkipOptions(), EngineContext(hf_config=unreadable, vocab_size=VOCAB))


def test_candidates_by_confidence():
    """The ranges of the paper: (0, .5], (.5, .8], (.8, .95], (.95, 1]."""
    p = np.array([0.01, 0.5, 0.51, 0.79, 0.81, 0.94, 0.96, 1.0], np.float32)
    assert candidates_at(p).tolist() == [10, 10, 5, 5, 3, 3, 1, 1]


def drafts(rng, batch, depth, candidates, vocab=50):
    tokens = rng.permuted(np.tile(np.arange(vocab), (batch, depth, 1)), axis=-1)[:, :, :candidates]
    raw = np.sort(rng.dirichlet(np.ones(vocab) * rng.uniform(0.02, 1.0), (batch, depth)), -1)[:, :, ::-1]
    return tokens.astype(np.int32), raw[:, :, :candidates].astype(np.float32)


def slow(tokens, probabilities, length, siblings_too):
    """Nodes of one tree as (path of tokens -> score): the chain, and all of its siblings."""
    chain, siblings, path, score = {}, {}, (), 1.0
    for j in range(length):
        for r in range(1, min(int(candidates_at(probabilities[j, :1])[0]), tokens.shape[1])):
            if siblings_too and probabilities[j, r] > 0:
                siblings[*path, int(tokens[j, r])] = score * float(probabilities[j, r])
        path, score = (*path, int(tokens[j, 0])), score * float(probabilities[j, 0])
        chain[path] = score
    return chain, siblings


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6), st.integers(1, 4), st.integers(0, 6), st.integers(1, 10), st.integers(1, 20), st.booleans()
)
def test_equals_the_slow_version(seed, batch, depth, candidates, max_nodes, siblings_too):
    rng = np.random.default_rng(seed)
    tokens, probabilities = drafts(rng, batch, depth, candidates)
    drafted = rng.integers(0, depth + 1, batch).astype(np.int32)
    roots = rng.integers(0, 50, batch).astype(np.int32)
    made = Round([str(b) for b in range(batch)], SkipSet.empty(2), depth, tokens.shape[2])
    made.tokens[:], made.probabilities[:], made.drafted[:] = tokens, probabilities, drafted
    tree = candidate_tree(made, roots, max_nodes, siblings_too)
    tree.check()
    for b in range(batch):
        n = int(tree.counts[b])
        assert 1 <= n <= max_nodes and tree.tokens[b, 0] == roots[b]
        paths, of = {}, {0: ()}
        for i in range(1, n):
            of[i] = (*of[int(tree.parents[b, i])], int(tree.tokens[b, i]))
            paths[of[i]] = float(tree.scores[b, i])
        length = min(int(drafted[b]), max_nodes - 1)
        chain, siblings = slow(tokens[b], probabilities[b], length, siblings_too)
        assert [of[i] for i in range(1, length + 1)] == list(chain), (
            "the chain stands in front: nothing has to be moved"
        )
        assert (tree.parents[b, 1 : length + 1] == np.arange(length)).all() and len(paths) == n - 1
        for path, score in paths.items():
            assert score == pytest.approx((chain | siblings)[path], rel=1e-5)
        # The best siblings while nodes are left; of equal scores any may be taken.
        best = sorted(siblings.values(), reverse=True)[: max_nodes - 1 - length]
        assert sorted(paths.values()) == pytest.approx(sorted([*chain.values(), *best]), rel=1e-5)
