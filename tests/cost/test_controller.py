"""The controller against machines and traffic that are known, and its shares against plain enumeration."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known import ROOFLINE

from freedraft.cost.acceptance import SIZE, Acceptance
from freedraft.cost.allocation import allocate, allocate_width
from freedraft.cost.controller import Auto, make_controller
from freedraft.cost.policies import Fixed, Knee
from freedraft.cost.probes import PROBE_EVERY
from freedraft.draft import DraftBatch
from freedraft.step import EngineContext
from layerskip_plugin.skip_set import SkipSet
from tests.support.continuations import observe
from tests.support.steps import make_step


def controller(longest: int = 8, **options: object) -> Auto:
    return Auto(ROOFLINE, longest, **options)


def chains(p: list[list[float]], kinds: int = 0) -> DraftBatch:
    """Chains of nodes with these probabilities given their parents; token i at depth i."""
    draft = DraftBatch.empty(len(p), 1 + max(map(len, p), default=0))
    for b, row in enumerate(p):
        n = len(row)
        draft.counts[b] = n + 1
        draft.tokens[b, 1 : n + 1] = draft.depths[b, 1 : n + 1] = np.arange(1, n + 1)
        draft.parents[b, 1 : n + 1] = np.arange(n)
        draft.parents[b, 0], draft.scores[b, 0] = -1, 1.0
        draft.scores[b, 1 : n + 1] = np.cumprod(row)
        draft.kinds[b] = kinds
    return draft


growth = st.lists(st.floats(0.0, 0.4), min_size=16, max_size=16)
probabilities = st.lists(st.lists(st.floats(0.01, 0.99), max_size=4), min_size=1, max_size=3)


@settings(max_examples=200, deadline=None)
@given(probabilities, growth, st.integers(-1, 12))
def test_shares_are_the_best_of_all(p: list[list[float]], growth: list[float], forced: int) -> None:
    draft = chains(p)
    seconds = np.cumprod(1 + np.array(growth)) * 0.02  # by query tokens
    path = np.cumprod(np.pad([[*row, *[1] * (4 - len(row))] for row in p], ((0, 0), (1, 0)), constant_values=1), axis=1)
    batch = len(p)

    def tokens(cut: tuple[int, ...]) -> float:
        return batch + sum(path[b, 1 : n + 1].sum() for b, n in enumerate(cut))

    def rate(cut: tuple[int, ...]) -> float:
        return tokens(cut) / seconds[batch + sum(cut)]

    cuts = list(itertools.product(*(range(len(row) + 1) for row in p)))
    counts = draft.counts.copy()
    chosen, gain, longest = allocate(path, counts, seconds[batch:], 0.0, forced)
    cut = tuple(int(n) - 1 for n in counts)
    assert sum(cut) == chosen and longest == max(cut) + 1
    if forced >= 0:
        wanted = min(forced, sum(map(len, p)))
        assert chosen == wanted
        assert tokens(cut) == pytest.approx(max(tokens(c) for c in cuts if sum(c) == wanted))
    else:
        assert rate(cut) == pytest.approx(max(map(rate, cuts)))
        assert gain == pytest.approx(rate(cut) / rate((0,) * batch) - 1) and gain >= 0


@settings(max_examples=100, deadline=None)
@given(probabilities, growth)
def test_the_width_is_the_best_of_all(p: list[list[float]], growth: list[float]) -> None:
    draft, batch = chains(p), len(p)
    seconds = np.cumprod(1 + np.array(growth)) * 0.02  # by query tokens
    path = np.cumprod(np.pad([[*row, *[0] * (4 - len(row))] for row in p], ((0, 0), (1, 0)), constant_values=1), axis=1)
    widths = np.array([1, 2, 4, 5], np.int32)
    most = max(map(len, p)) + 1
    candidates = [w for i, w in enumerate(widths) if i == 0 or widths[i - 1] < most]
    rates = {w: path[:, :w].sum() / seconds[batch * w] for w in candidates}
    counts = draft.counts.copy()
    width, gain, longest = allocate_width(path, counts, seconds[batch * np.array([1, *widths])], 0.0, -1, widths)
    assert rates[width] == pytest.approx(max(rates.values()))
    assert gain == pytest.approx(rates[width] / rates[1] - 1)
    assert np.array_equal(counts, np.minimum(draft.counts, width)) and longest == counts.max()


def test_acceptance_learns_what_scores_are_worth() -> None:
    acceptance, rng = Acceptance(), np.random.default_rng(0)
    draft = chains([[0.6, 0.6]], kinds=3)
    before = acceptance.probabilities(draft)[0]
    assert before == pytest.approx([1, 0.6, 0.36])
    for _ in range(1500):
        hits = list(itertools.takewhile(lambda p: rng.random() < p, (0.2, 0.9)))
        observe(acceptance, draft, [[*range(1, len(hits) + 1), 99]])
    after = acceptance.probabilities(draft)[0]
    assert after[1] == pytest.approx(0.2, abs=0.1)
    assert after[2] / after[1] == pytest.approx(0.9, abs=0.12)


def test_an_outcome_counts_once_per_child_of_the_true_path() -> None:
    tree = DraftBatch.empty(1, 6)
    # root -> 1 (token 10), 2 (token 11); 2 -> 3 (token 12), 4 (token 13); 1 -> 5 (token 14), not on the true path
    tree.parents[0], tree.depths[0], tree.counts[0] = [-1, 0, 0, 2, 2, 1], [0, 1, 1, 2, 2, 2], 6
    tree.tokens[0], tree.scores[0] = [9, 10, 11, 12, 13, 14], [1, 0.5, 0.3, 0.1, 0.1, 0.2]
    acceptance = Acceptance()
    assert [observe(acceptance, tree, [tokens]) for tokens in ([11, 13, 5], [8], [])] == [4, 2, 0]
    assert np.isfinite(acceptance.bias).all() and acceptance.bias.shape == (SIZE,)


class Machine:
    """A clock, a machine of known step times, and text of which drafts are right with a known probability."""

    def __init__(self, seconds, batch: int = 1) -> None:
        self.now, self.seconds, self.batch = 100.0, seconds, batch
        self.rng = np.random.default_rng(5)
        self.ids = [f"r{i}" for i in range(batch)]
        self.position = 0

    def clock(self) -> float:
        return self.now

    def run(self, control: Auto, steps: int, accept: float, scored: float = 0.5, length: int = 8) -> list[int]:
        """Draft tokens verified, by step."""
        chosen = []
        source = np.zeros(self.batch * 16, np.int32)
        gained = np.ones(self.batch, np.int64)
        query_tokens = self.batch
        for _ in range(steps):
            texts = [source[b * 16 : b * 16 + gained[b]] for b in range(self.batch)]
            step = make_step(self.ids, texts, previous=(self.batch, query_tokens))
            control.update(step)
            n, counts = 0, np.ones(self.batch, np.int32)
            if longest := control.max_draft_len(step):
                draft = chains([[scored] * min(longest, length)] * self.batch)
                n = control.truncate(draft)
                counts = draft.counts
            control.end(step)
            query_tokens = self.batch + n
            self.now += self.seconds(self.batch, query_tokens)
            for b in range(self.batch):
                hits = 0
                while hits < 8 and self.rng.random() < accept:
                    hits += 1
                # The true text goes on as drafted for `hits` tokens; what was not verified is generated as one token.
                gained[b] = min(hits, int(counts[b]) - 1) + 1
                source[b * 16 : b * 16 + 16] = 99
                source[b * 16 : b * 16 + hits] = np.arange(1, hits + 1)
            chosen.append(n)
        return chosen


def flat(batch: int, query_tokens: int) -> float:
    return 0.02 + 0.002 * max(0, query_tokens - 6)


def steep(batch: int, query_tokens: int) -> float:
    return 0.004 * query_tokens


def test_it_finds_the_knee_of_the_machine() -> None:
    machine = Machine(flat)
    control = controller(clock=machine.clock)
    lengths = machine.run(control, 400, accept=0.7)
    rate = [sum(0.7**i for i in range(n + 1)) / flat(1, 1 + n) for n in range(9)]
    best = int(np.argmax(rate))
    achieved = np.mean([rate[n] for n in lengths[200:]])
    assert achieved >= 0.98 * rate[best], (best, np.bincount(lengths[200:]))


@pytest.mark.parametrize("batch", [1, 4, 16])
def test_where_nothing_pays_it_is_plain_but_for_probes(batch: int) -> None:
    machine = Machine(steep, batch)
    control = controller(clock=machine.clock)
    lengths = machine.run(control, 1500, accept=0.6)
    assert np.count_nonzero(lengths[500:]) <= 1000 / PROBE_EVERY
    assert control.times.count(batch, batch, 300.0) > 100


def test_drafting_that_costs_more_than_it_brings_stops_but_for_glances() -> None:
    machine = Machine(flat)
    control = controller(clock=machine.clock)
    drafted = 0
    original = control.truncate

    def slow_truncate(draft: DraftBatch) -> int:
        nonlocal drafted
        drafted += 1
        machine.now += 0.004  # a fifth of a step
        return original(draft)

    control.truncate = slow_truncate  # type: ignore[method-assign]
    machine.run(control, 300, accept=0.05)
    drafted = 0
    machine.run(control, 1000, accept=0.05)
    assert 1 <= drafted <= 100, "4 ms each, of 20 s: at most a hundredth, and probes"
    assert max(machine.run(control, 300, accept=0.95)[200:]) >= 4, "it comes back"


def test_a_clock_that_jumps_does_no_harm() -> None:
    machine = Machine(flat)
    control = controller(clock=machine.clock)
    machine.run(control, 200, accept=0.7)
    known = control.times.seconds(1, np.arange(1, 10), 300.0).copy()
    for jump in (-1e6, 1e9, math.nan, -5.0):
        machine.now = (100.0 if math.isnan(machine.now) else machine.now) + jump
        machine.run(control, 1, accept=0.7)
    machine.now = 100.0
    machine.run(control, 3, accept=0.7)
    assert np.allclose(control.times.seconds(1, np.arange(1, 10), 300.0), known, rtol=0.1)


def test_step_times_survive_a_restart(tmp_path) -> None:
    machine = Machine(steep)
    control = controller(clock=machine.clock, path=tmp_path / "times.json")
    machine.run(control, 400, accept=0.6)
    control.save()
    again = controller(clock=machine.clock, path=tmp_path / "times.json")
    assert np.count_nonzero(machine.run(again, 90, accept=0.6)) <= 3


@pytest.mark.parametrize("besides", [0.0, 0.01])
def test_what_rounds_take_besides_is_noticed(besides: float) -> None:
    """A pass takes .4 of a step, and each round more that nobody is charged for."""
    now = 0.0
    auto = controller(clock=lambda: now)
    recipe, batch = SkipSet(30, frozenset({1}), frozenset()), 1
    for number in range(200):
        previous = (batch, 2 if number % 3 == 1 else 1) if number else None
        step = make_step(["a"], [[3]], previous=previous, texts=[[1, 2, 3]])
        auto.update(step)
        if number % 3 == 0:
            now += 0.02
            auto.record_pass(recipe, batch, 0.02)
            now += besides
        auto.end(step)
        now += 0.05
    assert auto.overrun == pytest.approx((0.07 + besides) / 0.07, rel=0.02) and auto.overrun >= 1.0
    assert float(auto.pass_seconds(recipe, 1)) == pytest.approx(0.02, rel=0.05)
    assert float(auto.step_seconds(1, 2)) == pytest.approx(0.05, rel=0.05), "which steps are not charged for"


def test_a_step_that_did_other_work_teaches_no_time() -> None:
    machine = Machine(flat)
    control = controller(clock=machine.clock)
    for previous in ((1, 1), None, None):
        step = make_step(["a"], [[1]], previous=previous)
        control.update(step)
        control.end(step)
        machine.now += 0.02
    assert control.times.seen == 0
    control.interrupt()
    control.update(make_step(["a"], [[1]], previous=(1, 1)))
    assert control.times.seen == 0, "what lies between is not known"


class _Config:
    def __init__(self, values: dict) -> None:
        self.values = values

    def to_dict(self) -> dict:
        return self.values


@pytest.mark.parametrize("readable", [True, False])
def test_a_model_that_cannot_be_read_is_left_to_the_rule(readable: bool, caplog: pytest.LogCaptureFixture) -> None:
    config = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    context = EngineContext(hf_config=_Config(config if readable else {}), max_draft_tokens=8, dtype="torch.float32")
    control = make_controller(context)
    assert type(control) is (Auto if readable else Knee)
    warnings = [record for record in caplog.records if "policy 'knee' decides" in record.message]
    assert len(warnings) == (not readable)
    assert control.max_draft_len(make_step(["a"], [[1]])) > 0, "and the rule still answers"
    assert type(make_controller(context, "knee")) is Knee and type(make_controller(context, "fixed")) is Fixed


def test_steps_without_drafts_are_known_though_the_width_of_one_node_is_left_out() -> None:
    auto = controller(15, widths=np.array([4, 16], np.int32))
    assert not auto.baseline_known(2)
    for _ in range(20):
        auto.times.update(2, 8, 1.0, 1e-2)
    assert auto.baseline_known(2)
