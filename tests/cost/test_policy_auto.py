"""Policy "auto" in engines of known step times and traffic: the lengths of the most tokens per second, plain steps
where no draft pays, and content that changes."""

import math
from functools import partial

import numpy as np
import pytest
from known import roofline_on

from freedraft.cost.probes import PROBE_EVERY
from freedraft.draft import DraftBatch
from tests.support.simulated import V1, V2, Engine, Seconds, Sglang, Text


def knee(batch: int, query_tokens: int) -> float:
    return 0.02 + 0.002 * max(0, query_tokens - 6)


def flat(batch: int, query_tokens: int) -> float:
    return 0.02 + 0.0005 * max(0, query_tokens - 24)


def drafting(batch: int, query_tokens: int) -> float:
    """As on a GPU that waits for drafts: any cost a part of the step, more tokens nearly nothing."""
    return 0.010 + (0.002 if query_tokens > batch else 0.0) + 1e-5 * query_tokens


def steep(batch: int, query_tokens: int) -> float:
    return 0.004 * query_tokens


SHARES = (0.02, 0.3, 0.8)
V2_CASES = [(V2, seconds, SHARES[(i + j) % 3], batch) for i, seconds in enumerate((flat, drafting, steep))
            for j, batch in enumerate((1, 7, 40))]  # fmt: skip


@pytest.mark.parametrize(("engine", "seconds", "accept", "batch"), [(V1, knee, 0.7, 1), *V2_CASES])
def test_within_two_percent_of_the_best_fixed_length(engine: type, seconds: Seconds, accept: float, batch: int) -> None:
    served = engine(seconds, noise=0.03)
    lengths = served.run(batch, Text(accept), 2000)[600:, 2] / batch
    tokens = sum((1 - accept ** (n + 1)) / (1 - accept) for n in lengths)
    time = sum(seconds(batch, int(batch * (1 + n))) for n in lengths)
    assert batch * tokens / time >= 0.98 * max(served.rates(batch, Text(accept))), np.bincount(lengths.astype(int))


@pytest.mark.parametrize(("engine", "batch"), [(V1, 1), (V1, 16), (V2, 4)])
def test_where_nothing_pays_it_is_plain_but_for_probes(engine: type, batch: int) -> None:
    served = engine(steep)
    drafted = served.run(batch, Text(0.6), 1500)[500:, 2]
    assert np.count_nonzero(drafted) <= 1000 / PROBE_EVERY + (engine is V2)
    assert served.controller.measured.times.count(batch, batch, 300.0) > 100


def test_batch_sizes_that_alternate_have_lengths_of_their_own() -> None:
    served, lengths = V2(flat), {1: [], 100: []}
    for i in range(120):
        batch = 1 if i % 2 else 100
        lengths[batch] += (served.run(batch, Text(0.6), 20)[:, 2] / batch).tolist()
    assert served.table[1] == 8 and served.table[100] == 0
    # A probe is taken back also if the next step is of another size.
    assert all(np.mean(np.array(lengths[batch][600:]) == best) > 0.85 for batch, best in ((1, 8), (100, 0)))


def test_drafting_that_costs_more_than_it_brings_stops_but_for_glances() -> None:
    served = V1(knee, drafting=0.004)  # a fifth of a step
    served.run(1, Text(0.05), 300)
    before = served.method.proposed
    served.run(1, Text(0.05), 1000)
    assert 1 <= served.method.proposed - before <= 100, "4 ms each, of 20 s: at most a hundredth, and probes"
    assert max(served.run(1, Text(0.95), 300)[200:, 2]) >= 4, "it comes back"


def test_a_clock_that_jumps_does_no_harm() -> None:
    served = V1(knee)
    served.run(1, Text(0.7), 200)
    known = served.controller.measured.times.seconds(1, np.arange(1, 10), 300.0).copy()
    for jump in (-1e6, 1e9, math.nan, -5.0):
        served.now = (100.0 if math.isnan(served.now) else served.now) + jump
        served.run(1, Text(0.7), 1)
    served.now = 100.0
    served.run(1, Text(0.7), 3)
    assert np.allclose(served.controller.measured.times.seconds(1, np.arange(1, 10), 300.0), known, rtol=0.1)


def h200(batch: int, query_tokens: int) -> float:
    """As measured of an 8B model at batch 1: 5.05 ms without drafts, 6.7 ms with 8 and 7.4 ms with 32 draft tokens."""
    draft_tokens = query_tokens - batch
    return 1e-3 * (5.0 + 0.05 * batch + (1.417 + 0.0292 * draft_tokens if draft_tokens else 0.0))


def on_h200(engine: type) -> Engine:
    return engine(h200, roofline_on("h200"), 32, drafting=30e-6)


# What the drafter promises of text of which nothing is accepted may be wrong.
ALL, NONE, NONE_AND_KNOWN = Text(0.99, 0.95), Text(0.0, 0.95), Text(0.0, 0.05)


@pytest.mark.parametrize("engine", [V1, V2])
@pytest.mark.parametrize("none", [NONE, NONE_AND_KNOWN])
def test_where_nothing_is_accepted_any_more_steps_are_soon_plain(engine: type, none: Text) -> None:
    served = on_h200(engine)
    for batch in (1, 8, 32):
        served.run(batch, ALL, 600)
    of_best = partial(served.of_best, batch=1, text=none)
    rows = served.run(1, none, 400)
    assert of_best(rows[:200]) >= 0.97 and of_best(rows[200:]) >= 0.985


@pytest.mark.parametrize(
    ("engine", "batch", "none"),
    [
        (V1, 1, NONE),
        (Sglang, 1, NONE),
        (Sglang, 12, NONE_AND_KNOWN),
        (V2, 1, NONE),
        (V2, 12, NONE_AND_KNOWN),
        (V2, 32, NONE),
    ],
)
def test_drafts_that_are_accepted_again_are_soon_made(engine: type, batch: int, none: Text) -> None:
    served = on_h200(engine)
    for text in (ALL, none, ALL, none, ALL):
        rows = served.run(batch, text, 400 if text == none else 200)
        assert served.of_best(rows[50:], batch, text) >= 0.95, text


class WithAdapters(Sglang):
    adapters = True


def test_a_step_without_drafts_takes_as_long_where_all_verify_the_same_number_of_nodes() -> None:
    served = WithAdapters(steep, most=32)
    served.run(1, Text(0.5, 0.5), 20)
    plain, with_drafts = served.controller._seconds(DraftBatch.roots(np.zeros(1, np.int32)))
    assert plain == with_drafts == pytest.approx(steep(1, 32), rel=0.1)


class Overwriting(V2):
    """A step is learnt from once the next one is launched; the drafter's next draft then takes this one's memory."""

    def draft(self, ids: list[str], gained: list[list[int]]) -> np.ndarray:
        lengths = super().draft(ids, gained)
        newest = self.controller._cut
        self.controller.settle()
        for name in newest[0].__slots__ if newest else ():
            getattr(newest[0], name)[:] = 0
        return lengths


@pytest.mark.parametrize("batch", [1, 7])
def test_learning_after_the_launch_changes_no_decision(batch: int) -> None:
    early, late = Overwriting(flat), V2(flat)
    for accept in (0.8, 0.02, 0.6):
        assert (early.run(batch, Text(accept), 300) == late.run(batch, Text(accept), 300)).all()
    assert (early.controller.measured.acceptance.bias == late.controller.measured.acceptance.bias).all()
