"""What the drafter's tests share: stores from documents, the compiled drafter beside the oracle, streams of tokens."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import oracle
from numpy.typing import NDArray

from freedraft.draft import DraftBatch
from sssd_plugin.drafter import Drafter
from sssd_plugin.learned import FEATURES, SETS, Weights
from tests.support.stores import Documents, int32, joined, snapshot_of


def random_weights(seed: int) -> NDArray[np.float64]:
    """Around sensible ones, different in each weight set, as precise as a weights file."""
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 0.15, (SETS, FEATURES))
    values[:, :3] += (1.0, 0.4, 0.5)
    return np.array([[float(f"{v:.6g}") for v in row] for row in values])


def rows_of(requests: Sequence[Sequence[int]]) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """Arguments of `Drafter.extend` as an engine has them: rows in any order, stale tokens behind each request."""
    longest = max(map(len, requests)) + 3
    table = np.full((len(requests) + 1, longest), 7, np.int32)
    order = list(range(len(requests), 0, -1))
    for row, request in zip(order, requests, strict=True):
        table[row, : len(request)] = int32(request)
    return table, int32(order), int32([len(request) for request in requests])


def assert_equal(batch: DraftBatch, trees: Sequence[oracle.Tree]) -> None:
    """Exactly the oracle's trees, scores to the last bit."""
    batch.check()
    assert batch.batch_size == len(trees)
    for b, tree in enumerate(trees):
        n = int(batch.counts[b])
        assert batch.tokens[b, :n].tolist() == tree.tokens
        assert batch.parents[b, :n].tolist() == tree.parents
        assert batch.depths[b, :n].tolist() == tree.depths
        assert batch.scores[b, :n].tolist() == np.array(tree.scores, np.float32).tolist()


class Pair:
    """The compiled drafter and the oracle over the same store and requests."""

    def __init__(
        self,
        sub_indices: Sequence[Documents],
        *,
        scoring: str,
        vocab_size: int,
        max_nodes: int = 32,
        weights: Path | None = None,
    ) -> None:
        self.scoring = scoring
        self.vocab_size = vocab_size
        self.drafter = Drafter(vocab_size=vocab_size, max_nodes=max_nodes, scoring=scoring, weights=weights)  # type: ignore[arg-type]
        self.weights = Weights.load(weights).values
        self.requests: dict[str, list[int]] = {}
        self.use(sub_indices)

    def use(self, sub_indices: Sequence[Documents]) -> None:
        self.drafter.use(snapshot_of(sub_indices, self.vocab_size))
        self.store = oracle.OracleStore([joined(documents) for documents in sub_indices], self.vocab_size)

    def extend(self, requests: dict[str, Sequence[int]]) -> None:
        for name, tokens in requests.items():
            self.requests[name] = list(map(int, tokens))
        if requests:
            self.drafter.extend(list(requests), *rows_of(list(requests.values())))

    def append(self, new: dict[str, Sequence[int]]) -> None:
        for name, tokens in new.items():
            self.requests[name] = self.requests.get(name, []) + list(map(int, tokens))
        offsets = np.cumsum([0, *(len(tokens) for tokens in new.values())]).astype(np.int64)
        self.drafter.append(list(new), int32([t for tokens in new.values() for t in tokens]), offsets)

    def finish(self, name: str) -> None:
        self.requests.pop(name, None)
        self.drafter.finish([name])

    def compare(self, names: Sequence[str] | None = None, **options) -> DraftBatch:
        """Draft with both; the compiled drafter's batch, once it has proved equal."""
        names = list(self.requests) if names is None else list(names)
        options = {"max_nodes": self.drafter.max_nodes, **options}
        batch = self.drafter.draft(names, **options)
        requests = [self.requests.get(name, []) for name in names]
        trees = oracle.draft(self.store, requests, scoring=self.scoring, weights=self.weights, **options)
        assert_equal(batch, trees)
        return batch


@cache
def python_sources() -> dict[str, list[int]]:
    """Token streams of real text: modules of the standard library, cut into words, spaces and signs."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    ids: dict[str, int] = {}
    names = ("heapq", "bisect", "textwrap", "fnmatch", "string", "shlex", "queue", "sched", "contextlib", "functools")
    return {
        name: [
            ids.setdefault(word, len(ids))
            for word in re.findall(r"\w+|\n *|[^\w\s]", (folder / f"{name}.py").read_text(encoding="utf-8"))
        ]
        for name in names
    }
