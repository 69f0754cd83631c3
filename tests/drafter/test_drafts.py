"""What holds for every draft, whatever the scores are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

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
