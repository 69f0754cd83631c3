"""What holds for every draft, whatever the scores are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from drafting import append, python_sources, replace
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freedraft.draft import DraftBatch
from sssd_plugin.drafter import Drafter
from tests.support.stores import Documents, snapshot_of

SCORINGS = ("learned", "paper")
SLOW = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}


def drafter_over(
    sub_indices: Sequence[Documents], requests: Sequence[Sequence[int]], scoring: str, vocab_size: int = 50
) -> tuple[Drafter, list[str]]:
    snapshot = snapshot_of(sub_indices, vocab_size)
    drafter = Drafter(vocab_size=vocab_size, max_nodes=64, scoring=scoring, snapshot=snapshot)  # type: ignore[arg-type]
    names = [str(i) for i in range(len(requests))]
    replace(drafter, dict(zip(names, requests, strict=True)))
    return drafter, names


def copied(batch: DraftBatch) -> list[list[tuple[int, int, float]]]:
    """(token, parent, score) of each node, out of the views that the next draft overwrites."""
    return [
        [(int(batch.tokens[b, i]), int(batch.parents[b, i]), float(batch.scores[b, i])) for i in range(batch.counts[b])]
        for b in range(batch.batch_size)
    ]


def children_of(nodes: list[tuple[int, int, float]]) -> dict[int, list[int]]:
    children: dict[int, list[int]] = {}
    for i, (_, parent, _) in enumerate(nodes[1:], 1):
        children.setdefault(parent, []).append(i)
    return children


@pytest.mark.parametrize("shape", ["tree", "chain"])
@pytest.mark.parametrize("scoring", SCORINGS)
@given(
    request=st.lists(st.sampled_from([0, 1, 2, 3, 4, 5, 700, -1, 2**31 - 1]), min_size=1, max_size=30),
    document=st.lists(st.integers(0, 4), max_size=12),
)
@settings(max_examples=60, **SLOW)
def test_nothing_outside_of_the_vocabulary_is_drafted(
    scoring: str, shape: str, request: list[int], document: list[int]
) -> None:
    """As prompts with images hold it. What stands around it is."""
    drafter, names = drafter_over([[document]], [request], scoring, vocab_size=5)
    append(drafter, names[0], [0])
    draft = drafter.draft(names, max_nodes=64, shape=shape)  # type: ignore[arg-type]
    tokens = draft.tokens[0, 1 : draft.counts[0]]
    assert ((tokens >= 0) & (tokens < 5)).all()
    followed = {b for a, b in itertools.pairwise([*request, 0]) if a == 0} & set(range(5))
    assert shape == "chain" or followed <= set(tokens.tolist())


@pytest.mark.parametrize("scoring", SCORINGS)
def test_requests_do_not_see_each_other(scoring: str) -> None:
    """Requests over disjoint alphabets, no store: each drafts its own tokens, and the same as it would alone."""
    rng = np.random.default_rng(0)
    requests = [(rng.integers(0, 5, 60) + 5 * i).tolist() for i in range(8)]
    drafter, names = drafter_over([], requests, scoring)
    together = copied(drafter.draft(names, max_nodes=16))
    for i, (request, nodes) in enumerate(zip(requests, together, strict=True)):
        assert len(nodes) == 16
        assert {token // 5 for token, _, _ in nodes} == {i}
        alone, names_alone = drafter_over([], [request], scoring)
        assert copied(alone.draft(names_alone, max_nodes=16)) == [nodes]


@pytest.mark.parametrize("scoring", SCORINGS)
@given(text=st.lists(st.integers(0, 30), min_size=1, max_size=40), x=st.integers(31, 40), y=st.integers(31, 40))
@settings(max_examples=40, **SLOW)
def test_every_generated_token_is_visible_at_the_next_step(scoring: str, text: list[int], x: int, y: int) -> None:
    """x, y come out for the first time; as soon as x comes again, y is drafted after it: nothing else ever followed."""
    drafter = Drafter(vocab_size=50, max_nodes=8, scoring=scoring)  # type: ignore[arg-type]
    replace(drafter, {"r": text})
    for token in (x, y, x):
        append(drafter, "r", [token])
    nodes = copied(drafter.draft(["r"], max_nodes=8))[0]
    assert nodes[0][0] == x
    assert max((score, token) for token, parent, score in nodes[1:] if parent == 0)[1] == y


def test_scores_are_probabilities() -> None:
    """Learned scores of the children of a node and "none of these" sum to 1; the paper's need not."""
    sources = list(python_sources().values())
    drafter, names = drafter_over([sources[:6]], [source[:600] for source in sources[6:]], "learned", 50_000)
    batch = drafter.draft(names, max_nodes=64)
    batch.check()
    nodes_with_many = 0
    for nodes in copied(batch):
        for parent, children in children_of(nodes).items():
            total = sum(nodes[i][2] for i in children) / nodes[parent][2]
            assert total <= 1 + 1e-5
            nodes_with_many += len(children) > 1 and total > 0.5
    assert nodes_with_many > 4  # not for want of children


@pytest.mark.parametrize("scoring", SCORINGS)
@given(data=st.data())
@settings(max_examples=30, **SLOW)
def test_scores_fall_from_node_to_node(scoring: str, data: st.DataObject) -> None:
    """So the best nodes of a batch are a first part of each tree, and a row that is cut short is a tree."""
    requests = data.draw(st.lists(st.lists(st.integers(0, 3), max_size=20), min_size=1, max_size=5))
    drafter, names = drafter_over([[[0, 1, 2, 3, 0, 1, 0]]], requests, scoring, vocab_size=4)
    batch = drafter.draft(names, max_nodes=16, shape=data.draw(st.sampled_from(["tree", "chain"])))
    for row in copied(batch):
        assert all(a[2] >= b[2] for a, b in itertools.pairwise(row))
    batch.counts[:] = np.minimum(batch.counts, data.draw(st.integers(0, 16)))
    batch.check()


@pytest.mark.parametrize("scoring", SCORINGS)
def test_shapes_and_limits(scoring: str) -> None:
    source = python_sources()["queue"]
    drafter, names = drafter_over([[source]], [source[200:260], source[300:420]], scoring, 50_000)
    for max_nodes in (1, 2, 5, 64):
        for shape in ("tree", "chain"):
            batch = drafter.draft(names, max_nodes=max_nodes, shape=shape)  # type: ignore[arg-type]
            batch.check()
            assert batch.counts.min() >= 1 and batch.counts.max() <= max_nodes
            if shape == "chain":
                assert [len(batch.chain(b)) for b in range(2)] == (batch.counts - 1).tolist()
    # A best-first tree grows by its last node only; a higher bar cuts it short.
    small, large = (copied(drafter.draft(names, max_nodes=n)) for n in (8, 16))
    if scoring == "paper":
        assert [nodes[:8] for nodes in large] == small
    for bar in (0.05, 0.5, 0.999999):
        for above, nodes in zip(copied(drafter.draft(names, max_nodes=16, min_score=bar)), large, strict=True):
            assert above == [node for node in nodes if node[2] > bar or node[1] < 0]


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_batch_over_several_threads(scoring: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row what each request gets alone: whatever the batch, from less than a thread's share on."""
    sources = list(python_sources().values())
    requests = [tokens[: 200 + 17 * i] for i, tokens in enumerate(sources * 4)]
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(threads)), raising=False)
    drafter, names = drafter_over([[s[:800]] for s in sources[:3]], requests, scoring, vocab_size=50_000)
    alone = [copied(drafter.draft([name], max_nodes=16))[0] for name in names]
    for size in (1, 15, 16, 31, 40):
        assert copied(drafter.draft(names[:size], max_nodes=16)) == alone[:size]
    unknown = drafter.draft([*names[:20], "unknown", *names[20:]], max_nodes=16)
    assert unknown.counts[20] == 0 and copied(unknown)[21:] == alone[20:]
    drafter.close()
