"""The parts of policy "auto": shares against plain enumeration, acceptance, times and lengths."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from known import LLAMA3_8B, ROOFLINE, engine_context

from freedraft.cost.acceptance import Acceptance
from freedraft.cost.allocation import allocate, allocate_width
from freedraft.cost.auto import Auto
from freedraft.cost.auto_by_batch import BatchLengths, candidate_lengths
from freedraft.cost.controller import FullLength, Knee
from freedraft.cost.measured import Head, Measured
from freedraft.cost.policies import make_controller
from freedraft.draft import DraftBatch
from tests.support.steps import chains, make_step

LENGTHS = candidate_lengths(8)
growth = st.lists(st.floats(0.0, 0.4), min_size=16, max_size=16)
probabilities = st.lists(st.lists(st.floats(0.01, 0.99), max_size=4), min_size=1, max_size=3)


def paths(p: list[list[float]]) -> np.ndarray:
    """float64 [B, 5]: probability of every node of chains; 0 beyond their ends."""
    return np.cumprod([[1.0, *row, *[0.0] * (4 - len(row))] for row in p], axis=1)


@settings(max_examples=60, deadline=None)
@given(probabilities, growth, st.just(-1) | st.integers(0, 12))
def test_shares_are_the_best_of_all(p: list[list[float]], growth: list[float], forced: int) -> None:
    batch, path, counts = len(p), paths(p), chains(p).counts
    seconds = np.cumprod(1 + np.array(growth)) * 0.02  # by query tokens

    def tokens(cut: tuple[int, ...]) -> float:
        return sum(path[b, : n + 1].sum() for b, n in enumerate(cut))

    def rate(cut: tuple[int, ...]) -> float:
        return tokens(cut) / seconds[batch + sum(cut)]

    cuts = list(itertools.product(*(range(len(row) + 1) for row in p)))
    chosen, gain, longest = allocate(path, counts, seconds[batch:], 0.0, forced)
    cut = tuple((counts - 1).tolist())
    assert sum(cut) == chosen and longest == max(cut) + 1
    if forced >= 0:
        assert chosen == min(forced, sum(map(len, p)))
        assert tokens(cut) == pytest.approx(max(tokens(c) for c in cuts if sum(c) == chosen))
    else:
        assert rate(cut) == pytest.approx(max(map(rate, cuts)))
        assert gain == pytest.approx(rate(cut) / rate((0,) * batch) - 1) and gain >= 0


@settings(max_examples=60, deadline=None)
@given(probabilities, growth)
def test_the_width_is_the_best_of_all(p: list[list[float]], growth: list[float]) -> None:
    batch, path, counts = len(p), paths(p), chains(p).counts
    before, widths = counts.copy(), np.array([1, 2, 4, 5], np.int32)
    seconds = np.cumprod(1 + np.array(growth)) * 0.02  # by query tokens
    candidates = [w for i, w in enumerate(widths) if i == 0 or widths[i - 1] < before.max()]
    rates = {w: path[:, :w].sum() / seconds[batch * w] for w in candidates}
    width, gain, longest = allocate_width(path, counts, seconds[batch * np.array([1, *widths])], 0.0, -1, widths, 1.0)
    assert rates[width] == pytest.approx(max(rates.values()))
    assert gain == pytest.approx(rates[width] / rates[1] - 1)
    assert np.array_equal(counts, np.minimum(before, width)) and longest == counts.max()


def observe(acceptance: Acceptance, draft: DraftBatch, tokens: list[int]) -> None:
    """Learn from the tokens that followed the root of a draft."""
    step = make_step(["a"], [tokens])
    acceptance.update(step)  # of the request that is drafted for
    acceptance.follow(draft)
    acceptance.update(step)


def test_acceptance_learns_what_scores_are_worth() -> None:
    acceptance, rng = Acceptance(), np.random.default_rng(0)
    draft = chains([[0.6, 0.6]], kinds=3)
    assert acceptance.probabilities(draft)[0] == pytest.approx([1, 0.6, 0.36])
    for _ in range(1500):
        hits = list(itertools.takewhile(lambda p: rng.random() < p, (0.2, 0.9)))
        observe(acceptance, draft, [*range(1, len(hits) + 1), 99])
    after = acceptance.probabilities(draft)[0]
    assert after[1] == pytest.approx(0.2, abs=0.1)
    assert after[2] / after[1] == pytest.approx(0.9, abs=0.12)


def test_an_outcome_counts_once_per_child_of_the_true_path() -> None:
    tree = DraftBatch.empty(1, 6)
    # root -> 1 (token 10), 2 (token 11); 2 -> 3 (token 12), 4 (token 13); 1 -> 5 (token 14), not on the true path
    tree.parents[0], tree.depths[0], tree.counts[0] = [-1, 0, 0, 2, 2, 1], [0, 1, 1, 2, 2, 2], 6
    tree.tokens[0], tree.scores[0] = [9, 10, 11, 12, 13, 14], [1, 0.5, 0.3, 0.1, 0.1, 0.2]
    tree.kinds[0] = np.arange(6)
    for tokens, learnt in (([11, 13, 5], [1, 2, 3, 4]), ([8], [1, 2]), ([], [])):
        acceptance = Acceptance()
        observe(acceptance, tree, tokens)
        p = acceptance.given_parent(np.full(6, 0.5, np.float32), tree.kinds[0], 8)
        assert np.flatnonzero(p != p[0]).tolist() == learnt, "by their kinds"


def test_a_rest_begins_when_nothing_is_left_to_learn_from_and_is_not_timed() -> None:
    now = 0.0
    auto = Auto(ROOFLINE.profile, 8, None, Measured(ROOFLINE, clock=lambda: now))
    step = make_step(["a"], [[1]], previous=(1, 1))
    auto.learn(step)
    auto.measured.acceptance.follow(chains([[0.5]]))
    auto.probes.begin_rest(1.0, 1.0)
    assert not auto.rests(), "the outcome of a draft is not known"
    auto.learn(step)
    assert auto.plan(step) == 0, "it rests all the same"
    auto.done(step)
    rested = 0
    while auto.rests():
        rested, now = rested + 1, now + 0.02
    auto.learn(step)
    assert rested > 10 and auto.measured.times.seen == 0 and auto.plan(step) > 0


def test_a_step_that_did_other_work_teaches_no_time() -> None:
    now = 0.0
    auto = Auto(ROOFLINE.profile, 8, None, Measured(ROOFLINE, clock=lambda: now))
    for previous in ((1, 1), None, None):
        step = make_step(["a"], [[1]], previous=previous)
        auto.learn(step)
        auto.done(step)
        now += 0.02
    auto.interrupt()
    auto.learn(make_step(["a"], [[1]], previous=(1, 1)))
    assert auto.measured.times.seen == 0, "what lies between is not known"


def test_steps_without_drafts_are_known_though_the_width_of_one_node_is_left_out() -> None:
    measured = Measured(ROOFLINE)
    assert not measured.baseline_known(2, (4, 16))
    for _ in range(20):
        measured.times.update(2, 8, 1.0, 1e-2)
    assert measured.baseline_known(2, (4, 16))


@pytest.mark.parametrize(
    ("asked", "drafted", "accepted", "expected", "within"),
    [(3, 3, 3, [1, 2, 4, 9], 1.7), (1, 1, 0, [1, 1, 1, 1], 1.7), (8, 1, 1, [1, 2, 2, 2], 0.3)],
)
def test_longer_drafts_are_expected_to_go_on_as_those_that_were_made(
    asked: int, drafted: int, accepted: int, expected: list[int], within: float
) -> None:
    """All are accepted, none is, or the drafter stops early."""
    lengths = BatchLengths(Measured(ROOFLINE), LENGTHS)
    for _ in range(300):
        step = make_step(["a"], [[*range(1, accepted + 1), 99]], capacities=asked)
        lengths.learn(step)
        assert lengths.plan(step) == asked
        lengths.cut(chains([[0.5] * drafted]))
    tokens = lengths.tokens()
    assert tokens == pytest.approx(expected, abs=within) and (np.diff(tokens) >= -0.01).all()
    assert tokens[:-1] == pytest.approx(expected[:-1], abs=0.3)


def on_top(verified: int, gained: int) -> BatchLengths:
    """Of a head of 3 tokens, after steps that verify this many draft tokens and gain this many tokens: n-grams have the
    first ones of 9, and then go wrong."""
    lengths = BatchLengths(Measured(ROOFLINE), (3, 7, 15), head=Head(3))
    for _ in range(300):
        lengths.head.learn(min(gained - 1, 3))
        step = make_step(["a"], [[*range(1, gained), 99]], capacities=verified)
        lengths.budget = 0
        lengths.learn(step)
        if asked := lengths.plan(step):
            lengths.cut(chains([[0.9] * min(asked, 9)]))
        lengths.settle()
    return lengths


def test_n_grams_on_top_of_a_head_bring_what_they_add() -> None:
    """Where n-grams that are right follow a head that is, all they have; where it never is, nothing."""
    assert on_top(15, 10).tokens() == pytest.approx([4, 8, 10], abs=0.7)
    assert on_top(15, 3).tokens() == pytest.approx([3, 3, 3], abs=0.3)
    assert on_top(0, 10).tokens()[2] > 8, "known before they are verified"


@pytest.mark.parametrize(("head", "drafting", "most"), [(0, 0.001, 10), (3, 0.001, 100), (3, 0.1, 10)])
def test_n_grams_beside_the_passes_of_a_head_are_looked_up_after_every_step(
    head: int, drafting: float, most: int
) -> None:
    """Of 100 steps of 20 ms that verify none. What takes longer than can be hidden is as rare as without a head."""
    now = [0.0]
    lengths = BatchLengths(Measured(ROOFLINE, clock=lambda: now[0]), (head, 7, 15), Head(head) if head else None)
    lengths.record_step(1, 1 + head, 100.0, 0.02)
    found = 0
    for _ in range(100):
        step = make_step(["a"], [[99]], capacities=0)
        lengths.learn(step)
        if asked := lengths.plan(step):
            found += 1
            now[0] += drafting
            lengths.cut(chains([[0.5] * asked]))
        lengths.settle()
    assert found == most if most == 100 else 0 < found <= most


def test_drafting_never_takes_more_than_a_quarter_of_a_step() -> None:
    """At 1 ms per request, 5 of 16 in a step of 20 ms: those that accepted drafts before those that had none, these
    before those that rejected them."""
    now, kept = [0.0], list[np.ndarray]()
    lengths = BatchLengths(Measured(ROOFLINE, clock=lambda: now[0]), (1, 3, 7))
    lengths.record_step(16, 16, 100.0, 0.02)
    for number in range(60):
        drafted = kept[-1] if kept else np.zeros(16, np.bool_)
        gained = [[9, 9, 99] if drafted[b] and b % 4 == 0 else [99] for b in range(16)]
        step = make_step([f"{b}" for b in range(16)], gained, capacities=7, drafted=7 * drafted)
        lengths.learn(step)
        assert lengths.plan(step) == 7
        if number:
            assert lengths.chosen is not None and lengths.chosen.sum() == 5
            kept.append(lengths.chosen)
        draft = chains([[0.5] * 7] * 16)
        draft.counts[:] = 8 if lengths.chosen is None else 8 * lengths.chosen
        now[0] += 2.0**-10 * np.count_nonzero(draft.counts)
        lengths.cut(draft)
        lengths.settle()
    times = np.array(kept).sum(0)
    assert (times[::4] > 40).all(), "what accepts stays"
    assert (times[np.arange(16) % 4 > 0] > 0).all(), "each is tried"
    lengths.record_step(16, 16, 100.0, 1.0)
    lengths.plan(step)
    assert lengths.chosen is None


def test_another_length_than_the_heads_must_win_by_three_percent() -> None:
    lengths = on_top(15, 10)
    tokens = lengths.tokens()
    for gain, best in ((1.02, 3), (1.04, 15)):
        seconds = tokens / tokens[-1] * np.array([gain, 2.0, 1.0])
        assert lengths.best(seconds) == best
        assert lengths.speedup == pytest.approx(gain if best > 3 else 1.0)
    decided = {length for _ in range(50) for *_, length in lengths.decide(1, 100.0)}
    assert decided <= {3, 7, 15}
    assert len(lengths.seconds(10_000, 100.0)) == 1, "however large the batch is, the head's"


@pytest.mark.parametrize(
    ("longest", "lengths"),
    [(1, (0, 1)), (2, (0, 1, 2)), (5, (0, 1, 3, 5)), (8, (0, 1, 3, 8)), (31, (0, 1, 3, 7, 15, 31))],
)
def test_a_large_bound_keeps_the_short_lengths(longest: int, lengths: tuple[int, ...]) -> None:
    assert candidate_lengths(longest) == lengths


@pytest.mark.parametrize(
    ("policy", "lengths", "config", "kind"),
    [
        ("auto", None, LLAMA3_8B, Auto),
        ("auto", None, {}, Knee),  # with a warning
        ("knee", None, LLAMA3_8B, Knee),
        ("fixed", None, LLAMA3_8B, FullLength),
        ("auto", LENGTHS, LLAMA3_8B, BatchLengths),
        ("auto", (8,), LLAMA3_8B, FullLength),  # the user's own table
        ("knee", LENGTHS, LLAMA3_8B, FullLength),
        ("fixed", LENGTHS, LLAMA3_8B, FullLength),
    ],
)
def test_the_controller_of_an_engine(
    policy: Any, lengths: tuple[int, ...] | None, config: dict, kind: type, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the model cannot be read, the rule answers."""
    controller = make_controller(engine_context(config, lengths=lengths), policy)
    assert type(controller) is kind
    warnings = [record for record in caplog.records if "policy 'knee' decides" in record.message]
    assert len(warnings) == (not config)
    assert controller.plan(make_step(["a"], [[1]])) > 0
