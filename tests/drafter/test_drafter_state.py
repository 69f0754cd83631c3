"""State by request id: finishing, threads, growth, another snapshot between steps."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from drafting import Pair, append, python_sources, replace

from sssd_plugin.drafter import Drafter
from sssd_plugin.request_index import RequestIndex, find, request_at
from tests.support.stores import int32, snapshot_of

SCORINGS = ("learned", "paper")


def run_all(*targets: Callable[[], None]) -> None:
    """Run in threads; raise what any of them raised."""
    with ThreadPoolExecutor(len(targets)) as pool:
        for done in [pool.submit(target) for target in targets]:
            done.result(60)


def test_rows_that_do_not_fit_are_left_untouched() -> None:
    """Missed tokens, tokens told twice, tokens taken back, an unknown request: all others of the batch go on."""
    pair = Pair([], scoring="learned", vocab_size=50)
    names = ["fits", "missed", "twice", "back", "unknown", "same"]
    held = {name: [1, 2, 3, 1] for name in names if name != "unknown"}
    pair.extend(held)
    starts, ends = np.array([0, 1, 0, 2, 0, 3]), np.array([2, 3, 2, 3, 2, 3])
    contexts = int32([6, 7, 4, 3, 2, 4])
    assert pair.drafter.update(names, int32([2, 3, 2]), starts, ends, contexts) == [1, 2, 3, 4]
    pair.requests["fits"] = [1, 2, 3, 1, 2, 3]
    counts = pair.compare(names).counts.tolist()
    assert [n > 0 for n in counts] == [name != "unknown" for name in names], "which drafts nothing, and leaves nothing"
    assert pair.drafter.draft([], max_nodes=8).batch_size == 0
    assert sorted(pair.drafter._index.request_ids()) == sorted(held)
    assert pair.drafter.update([], int32([]), np.zeros(0, np.int64), np.zeros(0, np.int64), int32([])) == []


def test_a_prompt_is_copied_and_another_one_replaces_it() -> None:
    drafter = Drafter(vocab_size=50, max_nodes=8)
    prompt = int32([1, 2, 3] * 10_000)
    drafter.replace("r", prompt)
    prompt[:] = 9
    assert drafter.tokens("r").tolist() == [1, 2, 3] * 10_000
    for tokens in ([4, 5], []):
        drafter.replace("r", int32(tokens))
        assert drafter.tokens("r").tolist() == tokens and drafter._index.request_ids() == ["r"]
    assert drafter.draft(["r"], max_nodes=8).counts.tolist() == [0]


def test_close() -> None:
    threads = set(threading.enumerate())
    drafter = Drafter(vocab_size=50, max_nodes=8)
    replace(drafter, {str(i): list(range(40)) * 50 for i in range(20)})
    drafter.draft(drafter._index.request_ids(), max_nodes=8)
    for _ in range(2):
        drafter.close()
        assert len(drafter) == 0 and set(threading.enumerate()) <= threads


@pytest.mark.parametrize("scoring", SCORINGS)
def test_threads(scoring: str) -> None:
    """Requests grow, finish and are drafted for at once. One thread checks every draft; at the end all are checked."""
    words = python_sources()["functools"]
    pair = Pair([[python_sources()["queue"]]], scoring=scoring, vocab_size=50_000, max_nodes=8)
    drafter = pair.drafter
    pair.extend({"steady": words[:300]})
    steady = pair.compare(["steady"])
    n = int(steady.counts[0])
    expected = [a[0, :n].tolist() for a in (steady.tokens, steady.parents, steady.scores)]
    done = threading.Event()
    final: dict[str, list[int]] = {}

    def churn(worker: int) -> None:
        rng = np.random.default_rng(worker)
        for round_ in range(12):
            name = f"{worker}-{round_}"
            start = int(rng.integers(0, 1000))
            held = words[start : start + int(rng.integers(1, 400))]
            drafter.replace(name, int32(held))
            for number in range(15):
                new = words[int(rng.integers(0, 1000)) :][: int(rng.integers(1, 40))]
                held = held + new
                if number % 2 and len(drafter.tokens(name)):
                    append(drafter, name, new)
                else:
                    drafter.replace(name, int32(held))
                assert len(drafter.tokens(name)) == len(held)
            if round_ % 3:
                drafter.finish([name])
            else:
                final[name] = held

    def draft() -> None:
        drafts = 0
        while not done.is_set() or drafts < 50:
            batch = drafter.draft(["steady"], max_nodes=8)
            assert batch.counts[0] == n
            assert [a[0, :n].tolist() for a in (batch.tokens, batch.parents, batch.scores)] == expected
            drafts += 1

    def churn_all() -> None:
        try:
            run_all(*(lambda w=w: churn(w) for w in range(4)))
        finally:
            done.set()

    run_all(churn_all, draft)
    assert len(drafter) == len(final) + 1
    pair.requests |= final
    pair.compare()
    drafter.close()


@pytest.mark.parametrize("scoring", SCORINGS)
def test_a_thousand_requests(scoring: str) -> None:
    """More requests than slots, prompts longer than their room, vocabularies larger than their tables."""
    rng = np.random.default_rng(0)
    pair = Pair([], scoring=scoring, vocab_size=2**31, max_nodes=4)
    for start in range(0, 1000, 250):
        pair.extend({f"{i}": rng.integers(0, 40, int(rng.integers(1, 50))).tolist() for i in range(start, start + 250)})
    pair.extend({"long": (rng.zipf(1.2, 20_000) % 2**31).tolist(), "distinct": list(range(0, 2**31, 2**17))})
    assert len(pair.drafter) == 1002
    pair.append({name: [1, 2, 3] for name in pair.requests})
    pair.compare()
    for i in range(0, 1000, 2):
        pair.finish(str(i))
    assert len(pair.drafter) == 502
    pair.append({f"new {i}": [i, 1, i] for i in range(600)})
    pair.compare(list(pair.requests)[::7])
    pair.drafter.finish(pair.drafter._index.request_ids())
    assert len(pair.drafter) == 0
    assert pair.drafter._index.nbytes() == 0


@pytest.mark.parametrize("scoring", SCORINGS)
def test_another_snapshot_between_steps(scoring: str) -> None:
    """From the next draft on, nothing of the old store is seen; the number of sub-indices may change."""
    sources = list(python_sources().values())
    pair = Pair([], scoring=scoring, vocab_size=50_000, max_nodes=16)
    pair.extend({"r": sources[0][:150], "s": sources[1][:150]})
    for sub_indices in ([[sources[2]]], [[s] for s in sources[3:8]], [[]], [], [[sources[4]], [sources[0]]]):
        pair.use(sub_indices)
        pair.compare()


def test_a_snapshot_lives_as_long_as_it_is_used() -> None:
    """The drafter keeps arrays alive while it reads their addresses."""
    source = python_sources()["contextlib"]
    drafter = Drafter(vocab_size=50_000, max_nodes=16, snapshot=snapshot_of([[source]], 50_000))
    replace(drafter, {"r": source[:50]})
    before = drafter.draft(["r"], max_nodes=16).tokens.tolist()
    rubbish = [np.full(len(source) + 32, 3, np.int32) for _ in range(50)]
    assert drafter.draft(["r"], max_nodes=16).tokens.tolist() == before
    assert len(rubbish) == 50


def test_a_count_does_not_wrap() -> None:
    index = RequestIndex()
    index.replace("r", int32([5] * 66_000 + [6, 5]))
    request = request_at(index.slots, index.slot_ids(["r"])[0])
    assert [int(request.counts[find(request, token)]) for token in (5, 6)] == [65_535, 1]


@pytest.mark.parametrize("n", [8_192, 32_768])
@pytest.mark.parametrize("piece", [1, 100_000], ids=["token by token", "at once"])
def test_fourteen_bytes_a_token(n: int, piece: int) -> None:
    """A long context costs at most 14 bytes a token, tables and spare room included.

    Zipf and Mandelbrot's law, with as many distinct tokens as recorded chats have: a fifth of 8k, a seventh of 32k.
    """
    rng = np.random.default_rng(0)
    ranks = np.arange(1, 50_001)
    shares = 1 / (ranks + 2.7) ** 1.3
    text = rng.choice(50_000, n, p=shares / shares.sum()).tolist()
    index = RequestIndex()
    index.replace("r", int32(text[:piece]))
    for start in range(piece, n, piece):
        new, contexts = int32(text[start : start + piece]), int32([min(n, start + piece)])
        assert index.update(index.slot_ids(["r"]), new, np.array([0]), np.array([len(new)]), contexts) == []
    assert len(index.tokens("r")) == n
    assert 12 * n < index.nbytes() <= 14 * n
