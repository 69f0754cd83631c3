"""Draft lengths that an engine decides by the batch's size, against machines and traffic that are known."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable

import numpy as np
import pytest
from known import LLAMA3_8B, ROOFLINE

from freedraft.cost.batch_lengths import BatchLengths, candidate_lengths
from freedraft.cost.probes import PROBE_EVERY
from freedraft.draft import DraftBatch
from freedraft.step import EngineContext
from sssd_plugin.drafter import Drafter
from tests.support.steps import make_step

LENGTHS = candidate_lengths(8)
LAG = 2  # steps until an asynchronous scheduler has heard of what a step says


def learner(lengths: tuple[int, ...] = LENGTHS) -> BatchLengths:
    return BatchLengths(ROOFLINE, lengths)


def chains(batch: int, length: int) -> DraftBatch:
    """Chains of which every token is said to be accepted half of the time; token i at depth i."""
    draft = DraftBatch.empty(batch, 9)
    draft.counts[:] = length + 1
    draft.tokens[:] = draft.depths[:] = np.arange(9)
    draft.parents[:] = draft.depths - 1
    draft.scores[:] = 0.5**draft.depths
    return draft


class Engine:
    """Steps of known times, and draft tokens that are accepted with a known probability if those before them are."""

    def __init__(self, seconds: Callable[[int, int], float], largest: int = 64) -> None:
        self.seconds, self.random = seconds, np.random.default_rng(3)
        self.table = [8] * (largest + 1)

    def run(self, lengths: BatchLengths, batches: list[int], accept: float, noise: float = 0.03) -> list[int]:
        """Steps of these batch sizes; the length that each verified."""
        coming, sent, verified = deque([0] * LAG), deque([[]] * LAG), []
        gained, ids = [[1]] * batches[0], [str(i) for i in range(batches[0])]
        for batch in batches:
            if batch != len(ids):
                gained, ids = [[1]] * batch, [str(i) for i in range(batch)]
            length = coming.popleft()
            step = make_step(ids, gained, capacities=length)
            if length:
                lengths.update(step)
                lengths.truncate(chains(batch, lengths.max_draft_len(step)))
            elif asked := lengths.observe(step):
                lengths.look(chains(batch, asked))
            right = np.cumprod(self.random.random((batch, 8)) < accept, axis=1).sum(axis=1)
            # The text goes on as drafted while that is right, and what a step does not verify comes as one token.
            gained = [[*range(1, n + 1), n + 1 if n < r else 99] for n, r in zip(np.minimum(right, length), right)]  # noqa: B905
            seconds = self.seconds(batch, batch * (1 + length)) * self.random.lognormal(0, noise)
            lengths.record_step(batch, batch * (1 + length), 300.0, seconds)
            sent.append(lengths.decide(batch, 300.0))
            for first, last, chosen in sent.popleft():
                self.table[first : last + 1] = [chosen] * len(self.table[first : last + 1])
            coming.append(self.table[batch])
            verified.append(length)
        return verified

    def rate(self, batch: int, length: int, accept: float) -> float:
        return batch * sum(accept**i for i in range(length + 1)) / self.seconds(batch, batch * (1 + length))


def flat(batch: int, query_tokens: int) -> float:
    return 0.02 + 0.0005 * max(0, query_tokens - 24)


def drafting(batch: int, query_tokens: int) -> float:
    """As on a GPU that waits for drafts: any cost a part of the step, more tokens nearly nothing."""
    return 0.010 + (0.002 if query_tokens > batch else 0.0) + 1e-5 * query_tokens


def growing(batch: int, query_tokens: int) -> float:
    return 0.02 * (1 + 0.05 * (query_tokens / batch - 1))


def steep(batch: int, query_tokens: int) -> float:
    return 0.002 * query_tokens


@pytest.mark.parametrize("seconds", [flat, drafting, steep])
@pytest.mark.parametrize("accept", [0.02, 0.3, 0.8])
@pytest.mark.parametrize("batch", [1, 7, 40])
def test_within_two_percent_of_the_best_fixed_length(seconds: Callable, accept: float, batch: int) -> None:
    engine, lengths = Engine(seconds), learner()
    verified = engine.run(lengths, [batch] * 2000, accept)[600:]
    rates = {length: engine.rate(batch, length, accept) for length in LENGTHS}
    time = sum(engine.seconds(batch, batch * (1 + n)) for n in verified)
    tokens = sum(rates[n] * engine.seconds(batch, batch * (1 + n)) for n in verified)
    assert tokens / time >= 0.98 * max(rates.values()), (rates, np.bincount(verified))


def test_where_nothing_pays_steps_are_plain_but_for_probes() -> None:
    verified = Engine(steep).run(learner(), [4] * 3000, 0.1)
    assert np.count_nonzero(verified[1000:]) <= 2000 / PROBE_EVERY + 2


def test_batch_sizes_that_alternate_have_lengths_of_their_own() -> None:
    engine, lengths = Engine(flat, 256), learner()
    batches = [1 if i // 20 % 2 else 200 for i in range(4000)]
    verified = np.array(engine.run(lengths, batches, 0.6))
    few, many = verified[2000:][np.array(batches[2000:]) == 1], verified[2000:][np.array(batches[2000:]) == 200]
    assert np.median(few) == 8 and np.median(many) == 0
    assert engine.table[1] == 8 and engine.table[200] == 0
    # A probe is taken back also if the next step is of another size.
    assert np.mean(few == 8) > 0.85 and np.mean(many == 0) > 0.85


def test_longer_drafts_are_expected_to_go_on_as_those_that_were_made() -> None:
    """Of drafts of 4 that are all accepted, and of 1 that is not."""
    for asked, accept in ((4, 1.0), (1, 0.0)):
        lengths = learner()
        for _ in range(300):
            step = make_step(["a"], [[1, 2, 3, 4, 99][: 5 if asked == 4 else 1] if accept else [99]], capacities=asked)
            lengths.update(step)
            lengths.truncate(chains(1, lengths.max_draft_len(step)))
        tokens = dict(zip(lengths.lengths.tolist(), lengths.tokens().tolist(), strict=True))
        assert tokens[4] == pytest.approx(1 + 4 * accept, abs=0.3) and tokens[8] >= tokens[4]
        assert tokens[8] == pytest.approx(1 + 8 * accept, abs=1.5)


def test_one_tree_says_what_all_shorter_lengths_bring() -> None:
    """The drafter's tree of fewer nodes is the first part of the larger one, and is expected to bring as much alone."""
    drafter, names = Drafter(vocab_size=8, max_nodes=9), ["a", "b"]
    for name, seed in zip(names, (1, 2), strict=True):
        drafter.replace(name, np.random.default_rng(seed).integers(0, 8, 300).astype(np.int32))

    def looked_at(length: int) -> tuple[dict[int, float], DraftBatch]:
        lengths = learner()
        lengths.max_draft_len(make_step(names, [[1], [1]], capacities=length))
        draft = drafter.draft(names, max_nodes=length + 1, shape="tree")
        lengths.look(draft)
        return dict(zip(LENGTHS, lengths.tokens().tolist(), strict=True)), copy.deepcopy(draft)

    by_length, whole = looked_at(8)
    assert (whole.counts == 9).all() and (whole.parents[:, 1:] != np.arange(8)).any(), "trees, and no chains"
    for length in LENGTHS[1:]:
        alone, part = looked_at(length)
        for field in ("tokens", "parents", "depths", "scores", "kinds"):
            assert np.array_equal(getattr(part, field)[:, : length + 1], getattr(whole, field)[:, : length + 1]), field
        assert alone[length] == pytest.approx(by_length[length])


def test_large_batches_have_lengths_that_can_be_priced() -> None:
    lengths = learner()
    assert len(lengths.seconds(1024, 300.0)) == 4, "none of 8"
    assert len(lengths.seconds(9000, 300.0)) == 1
    assert lengths.decide(9000, 300.0)[-1][2] == 0


def test_the_controller_of_an_engine() -> None:
    from types import SimpleNamespace

    from freedraft.cost.controller import make_controller
    from freedraft.cost.policies import Fixed

    known = {"hf_config": SimpleNamespace(to_dict=lambda: LLAMA3_8B), "max_draft_tokens": 8}
    assert type(make_controller(EngineContext(**known, lengths=LENGTHS))) is BatchLengths
    for context, policy in (
        (EngineContext(**known, lengths=(8,)), "auto"),  # the user's own table
        (EngineContext(**known, lengths=LENGTHS), "knee"),
        (EngineContext(**known, lengths=LENGTHS), "fixed"),
    ):
        assert type(make_controller(context, policy)) is Fixed


@pytest.mark.parametrize(
    ("longest", "lengths"),
    [(1, (0, 1)), (2, (0, 1, 2)), (5, (0, 1, 2, 4, 5)), (8, (0, 1, 2, 4, 8)), (32, (0, 2, 4, 8, 32))],
)
def test_a_large_bound_keeps_the_short_lengths(longest: int, lengths: tuple[int, ...]) -> None:
    assert candidate_lengths(longest) == lengths
