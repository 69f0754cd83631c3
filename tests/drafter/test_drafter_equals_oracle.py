"""The compiled drafter equals plain Python: by `learned` that of `oracle`, tokens, parents, depths, and scores to the
last bit; by `paper` the definition in `literal_trie`."""

import itertools
from pathlib import Path

import numpy as np
import oracle
import pytest
from drafting import Pair, python_sources, random_weights
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from bench.replay import accepted_length
from bench.scorer.weights import save
from freedraft.draft import DraftBatch
from freedraft.step import TOP_TOKENS
from tests.support.stores import int32

SCORINGS = ("learned", "paper")
EXAMPLES = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large]}


@pytest.fixture(scope="module")
def weight_files(tmp_path_factory: pytest.TempPathFactory) -> list[Path | None]:
    """The weights that ship, and others that tell every input and unit from the rest."""
    folder = tmp_path_factory.mktemp("weights")
    paths: list[Path | None] = [None]
    for seed in range(2):
        path = folder / f"{seed}.json"
        save(random_weights(seed), path)
        paths.append(path)
    return paths


@st.composite
def worlds(draw, ids: st.SearchStrategy[int] | None = None):
    """(vocabulary size, documents by sub-index, prompts): so few token ids that ties and long matches abound."""
    vocab_size = draw(st.integers(2, 6)) if ids is None else 2**31
    token = st.integers(0, vocab_size - 1) if ids is None else ids
    documents = st.lists(token, max_size=25)
    sub_indices = draw(st.lists(st.lists(documents, max_size=3), max_size=3))
    prompts = draw(st.lists(st.lists(token, max_size=30), min_size=1, max_size=3))
    return vocab_size, sub_indices, prompts, token


def options(data: st.DataObject) -> dict:
    return {
        "max_nodes": data.draw(st.sampled_from([16, 2, 1, 3, 8, 32])),
        "shape": data.draw(st.sampled_from(["tree", "chain"])),
    }


def step(data: st.DataObject, pair: Pair, token: st.SearchStrategy[int]) -> None:
    """What an engine may do between two drafts."""
    name = data.draw(st.sampled_from([*pair.requests, "late"]))
    held = pair.requests.get(name, [])
    new = data.draw(st.lists(token, min_size=1, max_size=5))
    match data.draw(st.sampled_from(["extend", "append", "roll back", "restart", "finish"])):
        case "extend":  # all requests, in another order
            grown = pair.requests | {name: [*held, *new]}
            pair.extend({n: grown[n] for n in sorted(grown)})
        case "append":
            pair.append({name: new, "other": new[:1]})
        case "roll back":
            pair.extend({name: held[: max(0, len(held) - len(new))]})
        case "restart":  # another request under the same id, seen by its last token
            pair.finish(name)
            pair.extend({name: new})
        case "finish":
            pair.finish(name)


# Beyond the direct buckets, up to 2^31 - 1; some collide in the request's hash table.
HUGE_IDS = st.sampled_from([0, 1, 2**20 - 1, 2**20, 2**24, 2**24 + 1, 2**31 - 2, 2**31 - 1])


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("ids", [None, HUGE_IDS], ids=["few ids", "huge ids"])
@given(data=st.data())
@settings(max_examples=30, **EXAMPLES)
def test_random_worlds(
    scoring: str, ids: st.SearchStrategy[int] | None, weight_files: list[Path | None], data: st.DataObject
) -> None:
    vocab_size, sub_indices, prompts, token = data.draw(worlds(ids))
    weights = data.draw(st.sampled_from(weight_files))
    pair = Pair(sub_indices, scoring=scoring, vocab_size=vocab_size, weights=weights)
    pair.extend({str(i): prompt for i, prompt in enumerate(prompts)})
    for _ in range(data.draw(st.integers(1, 4))):
        pair.compare(**options(data))
        step(data, pair, token)
    pair.compare(max_nodes=16)


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("seed", range(5))
def test_random_streams(scoring: str, seed: int, weight_files: list[Path | None]) -> None:
    """Longer streams: many candidates a node, more occurrences than are looked at, sub-indices of unequal size."""
    rng = np.random.default_rng(seed)
    vocab_size = int(rng.choice([2, 3, 20, 500, 40_000]))

    def stream(n: int) -> list[int]:
        return (rng.zipf(1.2, n) % vocab_size).tolist()

    phrases = [stream(int(rng.integers(3, 12))) for _ in range(12)]

    def text(n: int) -> list[int]:
        pieces = (phrases[rng.integers(12)] if rng.random() < 0.6 else stream(4) for _ in range(n))
        return [token for piece in pieces for token in piece]

    sub_indices = [[text(int(rng.integers(1, 30))) for _ in range(rng.integers(1, 6))] for _ in range(rng.integers(5))]
    weights = weight_files[seed % len(weight_files)]
    pair = Pair(sub_indices, scoring=scoring, vocab_size=vocab_size, weights=weights, max_nodes=64)
    pair.extend({str(i): text(int(rng.integers(1, 60))) for i in range(4)})
    for number in range(12):
        pair.compare(max_nodes=int(rng.choice([4, 16, 64])), shape="chain" if number % 3 == 1 else "tree")
        pair.append({name: text(1)[: int(rng.integers(1, 4))] for name in list(pair.requests)[number % 2 :]})


@pytest.mark.parametrize("scoring", SCORINGS)
@pytest.mark.parametrize("shape", ["tree", "chain"])
def test_real_text(scoring: str, shape: str) -> None:
    """Replays Python modules against a store of other modules, following the accepted path."""
    sources = python_sources()
    names = list(sources)
    sub_indices = [[sources[n] for n in names[:4]], [sources[n][:2000] for n in names[4:7]]]
    pair = Pair(sub_indices, scoring=scoring, vocab_size=50_000, max_nodes=16)
    steps = produced = 0
    for name in names[7:]:
        text = sources[name][:750]
        position = 500
        while position < len(text):
            pair.extend({name: text[:position]})
            position += 1 + accepted_length(pair.compare([name], shape=shape), int32(text[position:]))
            steps += 1
        produced += len(text) - 500
        pair.finish(name)
    assert steps > 150
    assert produced / steps > 1.3  # it does draft something


@pytest.mark.parametrize("scoring", SCORINGS)
def test_long_repetition(scoring: str) -> None:
    """One token over and over, in store and request: counts and occurrences at their limits, paths at their longest."""
    pair = Pair([[[3] * 400]], scoring=scoring, vocab_size=8, max_nodes=64)
    pair.extend({"short": [3, 3], "long": [3] * 700, "mixed": [1, 2, 3] * 200})
    for shape in ("tree", "chain"):
        batch = pair.compare(shape=shape)
        assert batch.depths.max() == (63 if scoring == "learned" else 10)
        pair.append({name: [3] for name in pair.requests})


@pytest.mark.parametrize("nodes", [47, 48, 49, 50])
def test_the_prefix_is_shortened_below_fifty_nodes(nodes: int) -> None:
    """Algorithm 2: what follows three tokens is looked at only if four have led to a tree of fewer than 50 nodes."""
    found = list(range(100, 100 + nodes))
    documents = [[1, 2, 3, 4, *found[i : i + 10]] for i in range(0, nodes, 10)]
    pair = Pair([[*documents, [9, 2, 3, 4, 50]]], scoring="paper", vocab_size=200, max_nodes=128)
    pair.extend({"r": [1, 2, 3, 4]})
    assert (50 in pair.compare().tokens) == (1 + nodes < 50)


def test_samples_are_shared_among_sub_indices() -> None:
    """By size, at least 20 each: sub-indices of 1 to 60 % of the store, with more matches than are sampled."""
    rng = np.random.default_rng(0)
    sub_indices = [[[1, 2, 3, int(t)] for t in rng.zipf(1.5, n) % 40] for n in (30, 120, 700, 60, 1500)]
    for scoring in SCORINGS:
        pair = Pair(sub_indices, scoring=scoring, vocab_size=40, max_nodes=64)
        pair.extend({"long": [1, 2, 3], "short": [7, 3]})
        pair.compare()


def test_more_candidates_than_fit() -> None:
    """Beyond 256 candidates at a node, new ones are refused and those already there still counted."""
    a, b, c, d, other = range(5)
    unique = itertools.count(10)

    def followers(n: int, *context: int) -> list[list[int]]:
        return [[*context, next(unique)] for _ in range(n)]

    contexts = {(d, c, b, a): 34, (other, c, b, a): 120, (other, b, a): 400, (other, a): 1200}
    contexts |= {(d, c, b, other): 400, (other, c, b, other): 1200}
    documents = [document for context, n in contexts.items() for document in followers(n, *context)]
    request = [t for context in ([c, b, other], [other, a]) for text in followers(70, *context) for t in text]
    pair = Pair([documents[::2], documents[1::2]], scoring="learned", vocab_size=4000)
    pair.extend({"full": [*request, d, c, b, a], "repeated": [*request, d, c, b, a, *request[-40:], d, c, b, a]})
    copies = [oracle.Copies.of_root(pair.store, request) for request in pair.requests.values()]
    seen = [oracle.gather(pair.store, r, r, 64, c) for r, c in zip(pair.requests.values(), copies, strict=True)]
    assert max(len(each.candidates) for each in seen) == oracle.MAX_CANDIDATES
    pair.compare()


def logits_of(batch: DraftBatch, vocab_size: int, seed: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Random likeliest tokens at every node; of a small vocabulary there are fewer than TOP_TOKENS."""
    rng = np.random.default_rng(seed)
    shape = (*batch.tokens.shape, TOP_TOKENS)
    tokens, log_probs = np.full(shape, -1, np.int32), np.full(shape, -np.inf, np.float32)
    for at in np.ndindex(shape[:2]):
        n = min(vocab_size, int(rng.integers(1, TOP_TOKENS + 1)))
        tokens[at][:n] = rng.permutation(vocab_size)[:n]
        log_probs[at][:n] = np.sort(np.log(rng.dirichlet(np.full(n, 0.3)).clip(1e-20)))[::-1]
    return tokens, log_probs


@settings(max_examples=60, **EXAMPLES)
@given(worlds(), st.data())
def test_recycled_logits(weight_files: list[Path | None], world, data: st.DataObject) -> None:
    vocab_size, sub_indices, prompts, token = world
    path = data.draw(st.sampled_from(weight_files))
    pair = Pair(sub_indices, scoring="learned", vocab_size=vocab_size, weights=path, recycle_megabytes=1)
    names = [f"r{i}" for i in range(len(prompts))]
    for i, name in enumerate(names):
        pair.tenants[name] = i % 2
        pair.drafter.set_tenant(name, i % 2)
    pair.extend(dict(zip(names, prompts, strict=True)))
    for _ in range(data.draw(st.integers(1, 5))):
        nodes = data.draw(st.sampled_from([1, 4, 16, 32]))
        batch = pair.compare(names, max_nodes=nodes, shape=data.draw(st.sampled_from(["tree", "chain"])))
        if data.draw(st.booleans()):  # requests have gone on without the tree
            pair.append({names[0]: [data.draw(token)]})
        pair.recycle(names, batch, *logits_of(batch, vocab_size, data.draw(st.integers(0, 2**32 - 1))))
        pair.append({name: data.draw(st.lists(token, min_size=1, max_size=3)) for name in names})
