"""The paper's scorer by its definition: every n-gram of a text counted in a literal trie, scores as ratios of counts.

Scores never rise along a path, so the tree that Algorithm 3 grows best first holds the paths with the highest scores.
Which of equal scores comes first is left open.
"""

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray
from oracle import OracleStore

from freedraft.cost.acceptance import KINDS
from freedraft.draft import DraftBatch

Path = tuple[int, ...]
Scores = dict[Path, float]

TOLERANCE = 1e-6  # relative, of scores in float32


def literal_trie(text: Sequence[int], longest: int, first: int = 0) -> Counter[Path]:
    """Count of every node: how often its path occurs in the text, from position `first` on."""
    return Counter(
        tuple(text[start:end])
        for start in range(first, len(text))
        for end in range(start + 1, min(start + longest, len(text)) + 1)
    )


def of_request(text: Sequence[int], match: int) -> Scores:
    """Algorithm 1 for a prefix of `match` tokens: the subtree of its node in the trie of all 8-grams. The prefix at the
    end of the text counts for nothing, and neither do places before the 128 newest of its last token."""
    prefix = tuple(text[-match:])
    places = [i for i, token in enumerate(text[:-1]) if token == text[-1]][-128:]
    if len(prefix) < match or not places:
        return {}
    trie = literal_trie(text, 8, max(0, places[0] - match + 1))
    before = trie[prefix] - 1
    deeper = 0.6 + 0.1 * match
    return {
        path[match:]: 0.6 * count / before * deeper ** (len(path) - match - 1)
        for path, count in trie.items()
        if len(path) > match and path[:match] == prefix and min(path[match:]) >= 0
    }


def continuations(store: OracleStore, prefix: Sequence[int]) -> Iterator[Path]:
    """Sampled continuations of a prefix, of at most 10 tokens, evenly spaced in the order of each suffix array: 100 by
    the sizes of the sub-indices, at least 20 of each."""
    for j, tokens in enumerate(store.sub_indices):
        places = store.range(j, prefix)
        take = min(len(places), max(20, 100 * len(tokens) // max(store.size, 1)))
        for q in range(take):
            start = places[q * len(places) // take] + len(prefix)
            continuation = [*tokens[start : start + 10], -1]
            yield tuple(continuation[: continuation.index(-1)])


def of_store(store: OracleStore, text: Sequence[int]) -> Scores:
    """Algorithm 2: prefixes of 4, 3, 2, 1 tokens until the tree has 50 nodes."""
    sampled: list[Path] = []
    trie: Counter[Path] = Counter()
    for k in range(min(4, len(text)), 0, -1):
        sampled += continuations(store, text[-k:])
        trie = Counter(path[:end] for path in sampled for end in range(len(path) + 1))
        if len(trie) >= 50:
            break
    return {path: count / len(sampled) for path, count in trie.items() if path}


def check(
    batch: DraftBatch,
    store: OracleStore,
    requests: Sequence[Sequence[int]],
    *,
    max_nodes: int,
    shape: str = "tree",
) -> None:
    """Each row is a draft by Algorithm 3."""
    batch.check()
    assert batch.batch_size == len(requests)
    for b, text in enumerate(requests):
        count = int(batch.counts[b])
        if not text:
            assert count == 0
            continue
        sources = [of_store(store, text), *(of_request(text, match) for match in (1, 2, 3, 4))]
        best: Scores = {}
        for source in sources:
            best |= {path: score for path, score in source.items() if score > best.get(path, 0.0)}
        paths: list[Path] = [()]
        for i in range(1, count):
            paths.append((*paths[batch.parents[b, i]], int(batch.tokens[b, i])))
        scores = batch.scores[b, :count].astype(float)
        assert (batch.tokens[b, 0], scores[0]) == (text[-1], 1.0)
        assert len(set(paths)) == count <= max_nodes
        for path, score, source in zip(paths[1:], scores[1:], batch.kinds[b, 1:count] % KINDS, strict=True):
            assert np.isclose(score, best[path], TOLERANCE, 0), path
            assert np.isclose(score, sources[source][path], TOLERANCE, 0), path
        assert (np.diff(scores) <= 0).all()
        check_left_out(best, paths, scores, max_nodes, shape)


def check_left_out(best: Scores, paths: list[Path], scores: NDArray[np.float64], max_nodes: int, shape: str) -> None:
    """No path that could have been drafted instead has a higher score; in a chain only those beside its nodes could."""
    last = scores[-1] if len(paths) == max_nodes else 0.0
    bar = dict.fromkeys(paths, last)  # by parent
    if shape == "chain":
        assert [path[:-1] for path in paths[1:]] == paths[:-1]
        bar = dict(zip(paths, [*scores[1:], 0.0], strict=True))
        if len(paths) == max_nodes:
            del bar[paths[-1]]
    for path, score in best.items():
        if path not in paths and path[:-1] in bar:
            assert score <= bar[path[:-1]] * (1 + TOLERANCE), path
