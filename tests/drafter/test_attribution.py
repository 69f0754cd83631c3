"""Which source an accepted token and a draft token are put down to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from drafting import replace
from prometheus_client import REGISTRY

from sssd_plugin.datastore.live.store import LiveStore
from sssd_plugin.drafter import Drafter
from sssd_plugin.metrics import EVERY, SourceMetrics
from sssd_plugin.scoring.attribution import CONTEXT, SOURCES
from tests.support.stores import int32, snapshot_of

VOCAB = 60


def longest(texts: list[list[int]], context: list[int], token: list[int]) -> int:
    """Brute force: the longest end of `context` that some text follows with `token`."""
    for k in range(min(CONTEXT, len(context)), 0, -1):
        wanted = context[-k:] + token
        if any(text[i : i + len(wanted)] == wanted for text in texts for i in range(len(text))):
            return k
    return 0


@pytest.mark.parametrize("isolation", ["salt", "shared"])
def test_the_longest_match_decides(isolation: Any) -> None:
    rng = np.random.default_rng(2)

    def text(n: int) -> list[int]:
        return (rng.zipf(1.3, n) % 12).tolist()

    static = [text(60) for _ in range(3)]
    live = LiveStore(VOCAB, static=snapshot_of([[part] for part in static], VOCAB), isolation=isolation)
    seen: dict[str, list[list[int]]] = {"a": [], "b": []}
    for number in range(12):
        name = "ab"[number % 2]
        document = text(30)
        live.insert(int32(document), live.tenant(name))
        for other in (name,) if isolation == "salt" else "ab":
            seen[other].append(document)
    drafter = Drafter(vocab_size=VOCAB, max_nodes=8, live=live)
    tally, expected = np.zeros((2, 2, len(SOURCES)), np.int64)
    for number in range(150):
        names = ["a", "b"]
        requests = [text(25), text(9)]
        gained = np.array([1 + number % 5, 3])
        ids = [f"{number}{name}" for name in names]
        for request, name in zip(ids, names, strict=True):
            drafter.set_tenant(request, live.tenant(name))
        replace(drafter, dict(zip(ids, requests, strict=True)))
        draft = drafter.draft(["unknown", *ids], max_nodes=5)
        drafter.attribute(["unknown", *ids], np.array([3, *gained]), draft, tally)
        drafter.finish(ids)
        for row, (request, name, gain) in enumerate(zip(requests, names, gained.tolist(), strict=True), start=1):
            n = len(request)
            new = [(0, request[:p], request[:p], request[p]) for p in range(n - gain, n - 1)]
            paths = [request]
            for token, parent in zip(draft.tokens[row, 1:].tolist(), draft.parents[row, 1:].tolist(), strict=True):
                if len(paths) < draft.counts[row]:
                    new.append((1, request, paths[parent], token))
                    paths.append([*paths[parent], token])
            for entry, own, context, token in new:
                found = [longest(texts, context, [token]) for texts in ([own], static, seen[name])]
                expected[entry, int(np.argmax(found)) if max(found) else 3] += 1
    assert tally.tolist() == expected.tolist()
    assert (expected[0] > 5).all() and (expected[1, :3] > 5).all()
    live.close()


def test_metrics_of_one_step_in_so_many() -> None:
    def value(name: str, source: str | None = None) -> float:
        return REGISTRY.get_sample_value(name, {"source": source} if source else {}) or 0.0

    static = snapshot_of([[[5, 6, 7, 8, 9]]], VOCAB)
    drafter = Drafter(vocab_size=VOCAB, max_nodes=8, snapshot=static)
    replace(drafter, {"x": [5, 6, 7, 8]})
    metrics, draft = SourceMetrics(static), drafter.draft(["x"], max_nodes=8)
    counters = "freedraft_sourced_tokens_total", "freedraft_sourced_draft_tokens_total"
    before = [value(counter, "static") for counter in counters]
    for _ in range(EVERY):
        metrics.update(drafter, ["x"], np.array([3]), draft)
    assert [value(counter, "static") - was for counter, was in zip(counters, before, strict=True)] == [2, 1]
    assert value("freedraft_static_tokens") == 6 and value("freedraft_static_sub_indices") == 1
