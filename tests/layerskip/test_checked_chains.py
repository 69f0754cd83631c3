"""Chains of n-grams that a first draft pass checks: what is drafted is the draft's own, in fewer passes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lookahead_tools import RECIPE, KnownCosts, cost
from test_layerskip_method import SETS, STEP, VOCAB, Engine, Model, text

from freedraft.draft import DraftBatch
from freedraft.draft_pass import RestOfBatch
from freedraft.hybrid.chains import Chains, likeliest
from layerskip_plugin.lookahead import Cost
from layerskip_plugin.lookahead.recipe_record import MAX_DRAFT_LEN

DEPTH = 5


@st.composite
def trees(draw: st.DrawFn) -> DraftBatch:
    batch, nodes = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    draft = DraftBatch.empty(batch, nodes)
    draft.parents[:, 0], draft.scores[:, 0] = -1, 1
    for b in range(batch):
        draft.counts[b] = draw(st.integers(1, nodes))
        for i in range(1, nodes):
            parent = draft.parents[b, i] = draw(st.integers(0, i - 1))
            draft.tokens[b, i], draft.depths[b, i] = draw(st.integers(0, 99)), draft.depths[b, parent] + 1
            draft.scores[b, i] = draft.scores[b, parent] * draw(st.integers(1, 9)) / 10
    return draft


@settings(deadline=None)
@given(trees(), st.integers(0, 8))
def test_the_likeliest_chain_goes_to_the_best_child_each_time(draft: DraftBatch, longest: int) -> None:
    nodes = np.arange(draft.max_nodes)
    p = np.where((nodes > 0) & (nodes < draft.counts[:, None]), draft.scores.astype(np.float64), 0.0)
    chains = likeliest(draft, p, longest)
    for b in range(draft.batch_size):
        at, path = 0, []
        while below := [i for i in range(1, draft.counts[b]) if draft.parents[b, i] == at]:
            at = max(below, key=lambda i: p[b, i])
            path.append(at)
        path = path[:longest]
        assert chains.tokens[b, : len(path)].tolist() == draft.tokens[b, path].tolist()
        assert (
            chains.chances[b, : len(path)].tolist() == p[b, path].tolist() and not chains.chances[b, len(path) :].any()
        )
        assert (np.diff(chains.chances[b]) <= 0).all()


def drafted(engine: Engine, names: list[str], chains: Chains | None, limits: list[int]) -> DraftBatch:
    step = engine.as_step(names)
    engine.method.update(step)
    engine.model.passes.clear()
    rows = np.arange(len(names))
    return engine.method.propose_for(step, rows, np.array(limits, np.int32), RestOfBatch(0, 0, None), chains)


@pytest.mark.parametrize("waits", [False, True])
@settings(deadline=None, max_examples=50)
@given(data=st.data())
def test_drafts_are_those_of_passes_one_after_the_other(waits: bool, data: st.DataObject) -> None:
    """Whatever a chain says: of a skip set that drafts rightly, often, or never."""
    names = list("abc")[: data.draw(st.integers(1, 3))]
    chosen = [data.draw(st.sampled_from(sorted(SETS))) for _ in names]
    limits = [data.draw(st.integers(1, DEPTH)) for _ in names]
    own, checking, serial = [], Engine(costs=(0.3, STEP), waits=waits), Engine(costs=(0.3, STEP), waits=waits)
    for engine in (checking, serial):
        for i, (name, skip_set) in enumerate(zip(names, chosen, strict=True)):
            engine.add(name, 5 + i, skip_set)
    for i, skip_set in enumerate(chosen):  # what the draft says, token by token
        model, token = Model(), np.array([5 + i], np.int32)
        draft_pass = model.build(SETS[skip_set], top_k=1, entropy=False, optimize=False)
        chain = []
        for position in range(DEPTH):
            (said,) = model.read([model.launch(draft_pass, np.zeros(1, np.intp), token, position)])
            token = said.tokens[0, :, 0]
            chain.append(int(token[0]))
        own.append(chain)
    length = data.draw(st.integers(1, DEPTH + 2))
    tokens = data.draw(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=length, max_size=length),
                                min_size=len(names), max_size=len(names)))  # fmt: skip
    right = [data.draw(st.integers(0, length)) for _ in names]
    for row, n, chain in zip(tokens, right, own, strict=True):
        n = min(n, len(chain))
        row[:n] = chain[:n]
    chances = np.cumprod(data.draw(st.lists(st.sampled_from([0.2, 0.7, 0.99]), min_size=length, max_size=length)))
    chains = Chains(np.array(tokens, np.int32), np.tile(chances, (len(names), 1)))
    draft = drafted(checking, names, chains, limits)
    draft.check()
    passes = checking.model.passes
    for b, limit in enumerate(limits):
        line = [i for i in range(1, draft.counts[b]) if draft.depths[b, i] > draft.depths[b, :i].max()]
        assert 1 <= len(line) <= limit
        assert draft.tokens[b, line].tolist() == own[b][: len(line)]
    assert all(len(rows) <= Model.max_rows for _, _, rows, _ in passes)
    written: dict[int, set[int]] = {}  # every position is run behind all before it, and none beyond the slots
    for _, position, rows, _ in passes:
        for row, p in zip(rows, np.broadcast_to(position, len(rows)).tolist(), strict=True):
            assert p < limits[row] and set(range(p)) <= written.setdefault(row, set())
            written[row].add(p)
    without = drafted(serial, names, None, limits)
    assert (draft.counts >= np.minimum(without.counts, 2)).all()


def test_a_chain_that_the_draft_agrees_with_takes_one_pass() -> None:
    own = [8, 11, 26, 5]  # 5 t + 3 mod 32
    for chains in (Chains(np.array([own], np.int32), np.full((1, 4), 0.9)), None):
        engine = Engine(costs=(0.05, STEP), sets={"empty": SETS["empty"]})
        for record in engine.method.lookahead.records:
            record.accepted[:] = record.reached[:] = record.verified[:] = np.arange(64) < DEPTH
        engine.add("a", 1)
        draft, passes = drafted(engine, ["a"], chains, [DEPTH]), engine.model.passes
        assert draft.depths.max() == DEPTH and len(passes) == (DEPTH if chains is None else 1)
        if chains is not None:
            assert passes[0][1].tolist() == [0, 1, 2, 3, 4] and passes[0][3] == [1, *own]


def expected_seconds(p: np.ndarray, stays: np.ndarray, longest: int, row: float) -> float:
    """Of a round whose first pass checks so many tokens of each chain, by going through all that may happen.

    Args:
        p: [R, K], the chance that the draft agrees with the chain so far; stays: [K + 1], that a request drafts more
            than so many tokens.
    """
    n, depth = p.shape
    checked = np.minimum((p > 0).sum(1), longest)
    passes = 0.0
    outcomes = list(itertools.product(range(1, depth + 2), range(depth + 1)))  # tokens drafted, tokens agreed with
    for each in itertools.product(outcomes, repeat=n):
        chance, needed = 1.0, {0}
        for i, (length, agreed) in enumerate(each):
            more = stays[length] if length <= depth else 0.0
            further = p[i, agreed] if agreed < depth else 0.0
            chance *= (stays[length - 1] - more) * ((p[i, agreed - 1] if agreed else 1.0) - further)
            needed |= {d for d in range(1, length) if min(agreed, checked[i]) < d}
        passes += chance * len(needed)
    return 1 + row * checked.sum() + (n - 1) * row + (passes - 1) * (1 + row * (n - 1))


@settings(deadline=None, max_examples=150)
@given(
    chances=st.lists(
        st.lists(st.sampled_from([1.0, 0.9, 0.5, 0.1, 0.0]), min_size=3, max_size=3), min_size=1, max_size=2
    ),
    row=st.sampled_from([0.0, 0.02, 0.2, 0.5]),
    stays=st.lists(st.sampled_from([1.0, 0.8, 0.3, 0.0]), min_size=3, max_size=3),
    room=st.integers(1, 9),
)
def test_as_much_is_checked_as_saves_most(
    chances: list[list[float]], row: float, stays: list[float], room: int
) -> None:
    policy = cost({1: 1.0, 2: 1.0 + row}, {1: 1.0})
    reached, p, n = np.cumprod([1.0, *stays]), np.cumprod(chances, 1), len(chances)
    policy.records[0].reached[:] = 0
    policy.records[0].reached[:4] = reached
    places = np.zeros(n, np.intp)
    lengths = policy.to_check(places, p, room)
    present = (p > 0).sum(1)
    possible = {k: expected_seconds(p, reached, k, row) for k in range(4)
                if k == 0 or n + np.minimum(present, k).sum() <= room}  # fmt: skip
    chosen = [k for k in possible if (np.minimum(present, k) == lengths).all()]
    assert chosen and possible[chosen[0]] == pytest.approx(min(possible.values()))
    serial = policy.estimate(places, np.array([n]), 4)
    checked = policy.estimate(places, np.array([n]), 4, p, room)
    assert serial.seconds[0, -1] - checked.seconds[0, -1] == pytest.approx(possible[0] - min(possible.values()))
    assert (checked.gain == serial.gain).all() and (checked.tokens == serial.tokens).all()


@pytest.mark.parametrize("longest", [1, 2, 64, 300])
def test_no_more_is_checked_than_may_be_drafted(longest: int) -> None:
    """Also where an engine allows drafts longer than is kept account of."""
    policy, chances = cost({1: 1.0, 2: 1.0}, {1: 1.0}, longest=longest), np.full((2, 200), 1.0)
    policy.records[0].reached[:] = 1.0
    lengths = policy.to_check(np.zeros(2, np.intp), chances, 1000)
    assert lengths.tolist() == [min(longest, MAX_DRAFT_LEN) - 1] * 2
    estimate = policy.estimate(np.zeros(2, np.intp), np.array([1, 2]), 250, chances, 1000)
    assert estimate.seconds.shape[1] == min(longest, MAX_DRAFT_LEN)
    assert estimate.seconds[:, -1] == pytest.approx(1.0)


def test_what_the_draft_never_agrees_with_is_soon_not_checked() -> None:
    policy, chances = cost({1: 1.0, 2: 1.1}, {1: 1.0}), np.full((1, 3), 0.9)
    policy.records[0].reached[:] = 1.0
    checks = []
    for _ in range(200):
        lengths = policy.to_check(np.zeros(1, np.intp), chances, 64)
        checks.append(int(lengths[0]))
        if lengths.any():
            policy.checks.record(chances, lengths, np.zeros(1, np.intp))
    assert checks[0] == 3 and not any(checks[100:])


@pytest.mark.parametrize("read", [[1, 4, 2, 3], [4, 1, 1, 2], [1, 2, 3, 4]])
def test_a_device_runs_no_more_passes_for_chains_than_without(read: list[int]) -> None:
    """Requests whose chains agree to different lengths join one another's passes."""
    names, own = list("abcd"), [text(5 + i, DEPTH + 1)[1:] for i in range(4)]
    tokens = np.array(
        [[*chain[: n - 1], *[(t + 1) % VOCAB for t in chain[n - 1 :]]] for chain, n in zip(own, read, strict=True)]
    )
    chains = Chains(tokens.astype(np.int32), np.full((4, DEPTH), 0.9))
    passes = {}
    for given_chains in (chains, None):
        engine = Engine(costs=(0.02, STEP), sets={"empty": SETS["empty"]}, waits=True)
        engine.method._model.max_rows = 64
        for record in engine.method.lookahead.records:
            record.accepted[:] = record.reached[:] = record.verified[:] = np.arange(64) < DEPTH
        for i, name in enumerate(names):
            engine.add(name, 5 + i)
        draft = drafted(engine, names, given_chains, [DEPTH] * 4)
        assert draft.depths.max(1).tolist() == [DEPTH] * 4
        passes[given_chains is None] = len(engine.model.passes)
    assert passes[True] == DEPTH and passes[False] <= 1 + DEPTH - min(read)


@pytest.mark.parametrize("read", [[4, 1], [1, 4]])
def test_tokens_that_were_read_already_are_free_for_those_who_have_them(read: list[int]) -> None:
    """Two requests of one recipe: one's next three tokens are known, the other's pass is to be paid."""
    policy = Cost(KnownCosts({RECIPE: {1: 5.0}}, {1: 1.0, 20: 1.2}), [RECIPE])
    policy.begin(["a", "b"], np.zeros(2, np.intp), 5)
    policy.read = np.array(read)
    more = policy.should_continue(0, np.arange(2, dtype=np.int32), np.full((2, 1), 0.9, np.float32), None)
    assert more.tolist() == [n > 1 for n in read]
