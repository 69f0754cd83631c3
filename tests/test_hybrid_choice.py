"""Which requests get draft passes: against an oracle that tries every subset."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from freedraft.cost.step_times import CENTRES
from freedraft.draft_pass import DraftPassEstimate
from freedraft.hybrid.choice import Choice, poorest_first, sizes_up_to
from freedraft.hybrid.choice import choose as choose_in_order

TABLE = 0.010 + 0.0004 * CENTRES


def estimate(count: int, rate: float, seconds: float, longest: int = 4) -> DraftPassEstimate:
    held = rate ** np.arange(1, longest + 1)
    sizes = sizes_up_to(count)
    passes = seconds * (1 + 0.02 * sizes[:, None]) * np.arange(1, longest + 1)
    return DraftPassEstimate(
        sizes, sizes[:, None] * held.cumsum(), sizes[:, None] * np.arange(1.0, longest + 1), passes
    )


def choose(p, kept, allowed, passes: DraftPassEstimate, table, widths=None, **rest) -> Choice:
    order = poorest_first(p, kept, allowed)
    return choose_in_order(p, kept, order, passes, table, None if widths is None else np.array(widths), **rest)


Step = tuple[float, float]  # tokens, seconds


def step_of(
    rows: tuple[int, ...], m: int, p: np.ndarray, kept: np.ndarray, passes: DraftPassEstimate, width: int
) -> Step:
    """What a step brings and takes when these requests draft m tokens each with the model."""
    tokens, verified = 0.0, 0.0
    for b in range(len(p)):
        end = width if width else kept[b]
        tokens += 1 + (passes.gain[0, m - 1] if b in rows else p[b, 1:end].sum())
        verified += width or 1 + (passes.tokens[0, m - 1] if b in rows else kept[b] - 1)
    seconds = float(np.interp(verified, CENTRES, TABLE))
    if rows:
        seconds += passes.seconds[list(passes.sizes).index(len(rows)), m - 1]
    return tokens, seconds


def all_steps(p, kept, allowed, passes, widths) -> list[Step]:
    steps = []
    for width in widths or (0,):
        steps.append(step_of((), 1, p, kept, passes, width))
        for k in range(1, int(allowed.sum()) + 1):
            for rows in combinations(np.flatnonzero(allowed).tolist(), k):
                longest = min(passes.gain.shape[1], width - 1) if width else passes.gain.shape[1]
                steps += [step_of(rows, m, p, kept, passes, width) for m in range(1, longest + 1)]
    return steps


chances = st.lists(st.floats(0, 1), min_size=1, max_size=5)


@settings(max_examples=150, deadline=None)
@given(chances, st.floats(0.05, 0.99), st.floats(0.0005, 0.02), st.booleans(), st.randoms())
def test_no_subset_is_better(first: list[float], rate: float, seconds: float, widths: bool, random) -> None:
    batch = len(first)
    p = np.zeros((batch, 4))
    p[:, 1:] = np.array(first)[:, None] ** np.arange(1, 4)
    # Equal lengths: which requests are the best is then a matter of their gains alone.
    kept = np.full(batch, 4, np.int32)
    allowed = np.array([random.random() < 0.8 for _ in range(batch)])
    passes = estimate(max(1, int(allowed.sum())), rate, seconds)
    ways = (1, 3, 5) if widths else None
    choice = choose(p, kept, allowed, passes, TABLE, ways, margin=1.0)
    steps = all_steps(p, kept, allowed, passes, ways)
    best = max(tokens / seconds for tokens, seconds in steps)
    np.testing.assert_allclose(choice.rate, best, rtol=1e-9)
    assert allowed[choice.rows].all()

    # With another use for the time, what is best is what leaves most beyond that.
    pace = best * (1.001 + random.random())
    choice = choose(p, kept, allowed, passes, TABLE, ways, rate=pace, margin=1.0)
    assert choice.rate == pace
    mine = [step_of(tuple(choice.rows), m, p, kept, passes, w) for w in ways or (0,) for m in range(1, w or 5)]
    if not len(choice.rows):
        mine = [step_of((), 1, p, kept, passes, w) for w in ways or (0,)]
    surplus = [[tokens - pace * seconds for tokens, seconds in some] for some in (mine, steps)]
    np.testing.assert_allclose(max(surplus[0]), max(surplus[1]), atol=1e-9)


def test_the_request_without_n_grams_gets_the_passes() -> None:
    p = np.zeros((2, 5))
    p[0, 1:] = 0.97, 0.95, 0.93, 0.9
    kept = np.array([5, 1], np.int32)
    passes = estimate(2, 0.9, 0.001)
    choice = choose(p, kept, np.ones(2, np.bool_), passes, TABLE)
    assert choice.rows.tolist() == [1]
    assert choose(p, kept, np.array([True, False]), estimate(1, 0.9, 0.001), TABLE).rows.tolist() == []
    # What steps with passes take besides is paid for, too.
    assert choose(p, kept, np.ones(2, np.bool_), replace(passes, overrun=1.02), TABLE).rows.tolist() == [1]
    assert choose(p, kept, np.ones(2, np.bool_), replace(passes, overrun=2.0), TABLE).rows.tolist() == []


def test_passes_that_cost_what_they_bring_are_left_out() -> None:
    p, kept = np.zeros((3, 1)), np.ones(3, np.int32)
    everyone = np.ones(3, np.bool_)
    assert len(choose(p, kept, everyone, estimate(3, 0.9, 0.001), TABLE).rows) == 3
    assert len(choose(p, kept, everyone, estimate(3, 0.9, 0.02), TABLE).rows) == 0
    assert len(choose(p, kept, everyone, estimate(3, 0.9, 0.001), TABLE, widths=(1,)).rows) == 0
