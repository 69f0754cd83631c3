"""Which source a verified and an accepted draft token is put down to."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from prometheus_client import REGISTRY

from freedraft.step import EngineContext
from sssd_plugin.method import SssdMethod
from sssd_plugin.options import SssdOptions
from sssd_plugin.scoring.origins import SOURCES
from tests.support.steps import make_step
from tests.support.stores import int32

VOCAB = 60


def counted(name: str) -> Counter[str]:
    values = {s: REGISTRY.get_sample_value(f"freedraft_sourced_{name}_total", {"source": s}) or 0 for s in SOURCES}
    return Counter({source: int(value) for source, value in values.items()})


@pytest.mark.parametrize(("scoring", "drafts"), [("learned", "input store other"), ("paper", "input store")])
def test_every_step_counts_what_it_verified_and_accepted(scoring: Any, drafts: str) -> None:
    rng, names = np.random.default_rng(2), [f"r{i}" for i in range(5)]
    context = EngineContext(vocab_size=VOCAB, max_draft_tokens=8)
    method = SssdMethod(SssdOptions(scoring=scoring, policy="fixed"), context)
    method.add_corpus("c", [int32(rng.permutation(np.arange(240) % 40))])
    source_of = method.drafter._source_of
    texts = {name: rng.integers(0, VOCAB, 9).tolist() for name in names}
    for name in names:
        method.begin(name, int32(texts[name][:-1]), None, {})
    gained, drafted = {name: texts[name][-1:] for name in names}, dict.fromkeys(names, 0)
    expected: list[Counter[str]] = [Counter(), Counter()]
    before = counted("draft_tokens"), counted("tokens")
    for number in range(60):
        rng.shuffle(names)
        step = make_step(
            names, [gained[n] for n in names], drafted=[drafted[n] for n in names], texts=[texts[n] for n in names],
            widths=(1, 9),
        )  # fmt: skip
        draft = method.draft(step)
        method.record_acceptance(step)
        assert [counted("draft_tokens") - before[0], counted("tokens") - before[1]] == expected
        for b, name in enumerate(names):
            verified = int(draft.counts[b]) - 1 - number % 2 * int(rng.integers(draft.counts[b]))  # the engine may cut
            drafted[name], path = verified, []
            node = int(rng.integers(min(3, verified) + 1))
            expected[0].update(SOURCES[source_of[kind]] for kind in draft.kinds[b, 1 : verified + 1])
            while node:
                path.append(int(draft.tokens[b, node]))
                expected[1][SOURCES[source_of[draft.kinds[b, node]]]] += 1
                node = int(draft.parents[b, node])
            gained[name] = [*path[::-1], int(rng.integers(VOCAB))]
            texts[name] += gained[name]
    assert all(expected[i][source] > 5 for i in (0, 1) for source in drafts.split()), expected
    method.close()
