"""Drafts of many requests: state by request id, threads, growth, another snapshot between steps, ids outside of the
vocabulary."""

import itertools
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from drafting import Pair, append, python_sources, replace
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from freedraft.draft import DraftBatch
from sssd_plugin.drafter import Drafter
from sssd_plugin.request_index import INDEXED, RequestIndex
from tests.support.stores import Documents, int32, snapshot_of

SCORINGS = ("learned", "paper")


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
    """Requests grow and finish in one thread while another drafts for one that stays: the same each time. At the end
    all are checked."""
    words = python_sources()["functools"]
    pair = Pair([[python_sources()["queue"]]], scoring=scoring, vocab_size=50_000, max_nodes=8)
    pair.extend({"steady": words[:300]})
    expected = copied(pair.compare(["steady"]))
    final: dict[str, list[int]] = {}

    def churn(worker: int) -> None:
        rng = np.random.default_rng(worker)
        for number in range(12):
            name, held = f"{worker}-{number}", words[int(rng.integers(0, 1000)) :][: int(rng.integers(1, 400))]
            pair.drafter.replace(name, int32(held))
            for _ in range(15):
                new = words[int(rng.integers(0, 1000)) :][: int(rng.integers(1, 40))]
                held = held + new
                append(pair.drafter, name, new)
            if number % 3:
                pair.drafter.finish([name])
            else:
                final[name] = held

    with ThreadPoolExecutor(4) as pool:
        churning = [pool.submit(churn, worker) for worker in range(4)]
        while not all(done.done() for done in churning):
            assert copied(pair.drafter.draft(["steady"], max_nodes=8)) == expected
        assert [done.result() for done in churning] == [None] * 4 and len(final) == 16
    pair.requests |= final
    pair.compare()
    pair.drafter.close()


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
def test_drafting_keeps_no_reference(scoring: str) -> None:
    """Most of its compiled code counts none: what took one would never give it back."""
    drafter = Drafter(vocab_size=50, max_nodes=8, scoring=scoring, snapshot=snapshot_of([[[1, 2, 3, 4] * 9]], 50))
    replace(drafter, {"r": [1, 2, 3] * 5})
    arrays = (
        drafter._view.table,
        drafter._view.bounds,
        drafter._index.slots,
        drafter._entries,
        *(drafter._weights or ()),
    )
    before = [sys.getrefcount(array) for array in arrays]
    for token in (1, 2, 3):
        assert drafter.draft(["r"], max_nodes=8).counts.tolist() > [1]
        append(drafter, "r", [token])
    assert [sys.getrefcount(array) for array in arrays] == before


@pytest.mark.parametrize("scoring", SCORINGS)
def test_another_snapshot_between_steps(scoring: str) -> None:
    """From the next draft on, nothing of the old store is seen; the number of sub-indices may change."""
    sources = list(python_sources().values())
    pair = Pair([], scoring=scoring, vocab_size=50_000, max_nodes=16)
    pair.extend({"r": sources[0][:150], "s": sources[1][:150]})
    for sub_indices in ([[sources[2]]], [[s] for s in sources[3:8]], [[]], [], [[sources[4]], [sources[0]]]):
        pair.use(sub_indices)
        pair.compare()


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


@pytest.mark.parametrize("mark", [40, 60, -1])
@pytest.mark.parametrize("scoring", SCORINGS)
def test_images_are_not_drafted_and_match_no_others(scoring: str, mark: int) -> None:
    """What follows the same word most often is drafted, and not what followed it behind another image."""
    drafter = Drafter(vocab_size=50, max_nodes=8, scoring=scoring, marks=[40])  # type: ignore[arg-type]
    image = [7, mark, mark, mark, 1]
    replace(drafter, {"a": [*image, 2, 9, 1, 3, 9, 1, 3, 9, *image], "b": [*image, 2, 7]})
    assert drafter.draft(["a"], max_nodes=2, shape="chain").tokens[0, :2].tolist() == [1, 3]
    draft = drafter.draft(["b"], max_nodes=8)
    assert 40 not in draft.tokens[0, : draft.counts[0]].tolist()


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_batch_over_several_threads(scoring: str, threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Row by row what each request gets alone, whatever the batch. A thread is woken only for what takes longer."""
    sources = list(python_sources().values())
    requests = [tokens[: 200 + 17 * i] for i, tokens in enumerate(sources * 4)]
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(threads)), raising=False)
    drafter, names = drafter_over([[s[:800]] for s in sources[:3]], requests, scoring, vocab_size=50_000)
    before = {*threading.enumerate()}
    alone = [copied(drafter.draft([name], max_nodes=16))[0] for name in names]
    for seconds, woken in ((1e3, False), (1e-9, threads > 1)):
        drafter._waking = seconds
        monkeypatch.setattr("sssd_plugin.drafter.MOST_WAKING", seconds)
        for size in (1, 15, 16, 31, 40):
            assert copied(drafter.draft(names[:size], max_nodes=16)) == alone[:size]
        assert bool({*threading.enumerate()} - before) == woken
    unknown = drafter.draft([*names[:20], "unknown", *names[20:]], max_nodes=16)
    assert unknown.counts[20] == 0 and copied(unknown)[21:] == alone[20:]
    drafter.close()


MOST = 500


class Prompts:
    """A drafter that indexes MOST tokens a step, and one that indexes all at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        rng = np.random.default_rng(3)
        pieces = [rng.integers(0, 300, 40) for _ in range(30)]
        self.text = int32(np.concatenate([pieces[i] for i in rng.integers(0, 30, 400)]))  # 16,000 tokens
        self.whole = Drafter(vocab_size=300, max_nodes=16)
        monkeypatch.setattr("sssd_plugin.drafter.MOST_INDEXED", MOST)
        self.drafter = Drafter(vocab_size=300, max_nodes=16)
        self.held: dict[str, int] = {}

    def begin(self, name: str, n: int) -> None:
        for drafter in (self.drafter, self.whole):
            drafter.replace(name, self.text[:n])
        self.held[name] = n

    def step(self) -> int:
        """Every request gains a token; returns the number of tokens that were indexed."""
        before = self._indexed()
        names, n = list(self.held), len(self.held)
        contexts = int32([held + 1 for held in self.held.values()])
        new, starts = self.text[contexts - 1], np.arange(n)
        for drafter in (self.drafter, self.whole):
            assert drafter.update(names, new, starts, starts + 1, contexts) == []
            drafter.draft(names, max_nodes=8, shape="chain").check()
        self.held = dict(zip(names, contexts.tolist(), strict=True))
        return self._indexed() - before

    def _indexed(self) -> int:
        return int(self.drafter._index.slots[:, INDEXED].sum())

    def same(self) -> bool:
        """Whether both draft the same."""
        one, two = (copied(each.draft(list(self.held), max_nodes=16)) for each in (self.drafter, self.whole))
        return one == two


def test_a_long_prompt_is_indexed_over_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step indexes more than its share, whatever begins in it; at the end drafts are as if it had been at once."""
    prompts = Prompts(monkeypatch)
    for name in ("a", "b"):
        prompts.begin(name, 300)
    prompts.begin("long", 6000)
    prompts.begin("other", 4000)
    assert not prompts.same()  # most of the prompts is not found yet
    for _ in range(10_300 // (MOST // 2)):
        assert prompts.step() <= MOST + 8
    assert not prompts.drafter._index.behind and prompts.same()


def test_prompts_that_end_or_begin_again_while_they_are_indexed(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = Prompts(monkeypatch)
    for name in ("ended", "again", "shorter", "kept"):
        prompts.begin(name, 5000)
    prompts.step()
    for drafter in (prompts.drafter, prompts.whole):
        drafter.finish(["ended", "unknown"])
    del prompts.held["ended"]
    prompts.begin("again", 7000)
    prompts.begin("shorter", 20)
    for _ in range(20_000 // (MOST // 2)):
        prompts.step()
    assert not prompts.drafter._index.behind and prompts.same()
    assert len(prompts.drafter.tokens("ended")) == 0
    prompts.begin("late", 5000)
    prompts.drafter.finish(["late"])
    prompts.drafter.close()
    assert not prompts.drafter._index.behind
