"""What the drafter's tests share: stores from documents, the compiled drafter beside the oracle, streams of tokens."""

import re
import sysconfig
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import literal_trie
import numpy as np
import oracle
from numpy.typing import NDArray

from bench.scorer.weights import initial_weights
from freedraft.cost.acceptance import KINDS, PASS_KINDS
from freedraft.draft import DraftBatch
from freedraft.step import NodeLogits
from sssd_plugin.drafter import Drafter
from sssd_plugin.scoring.weights import Weights
from tests.support.stores import Documents, int32, joined, snapshot_of


def random_weights(seed: int) -> Weights:
    """Around sensible ones, so that every input and unit counts, as precise as a weights file."""
    rng, start = np.random.default_rng(seed), initial_weights()
    values = start.layer + rng.normal(0, 0.15, start.layer.shape), rng.normal(0, 0.3, start.out.shape)
    values += (rng.uniform(0, 0.999, start.copies.shape),)
    return Weights(*(np.array([float(f"{v:.5g}") for v in x.flat], np.float32).reshape(x.shape) for x in values))


def replace(drafter: Drafter, requests: dict[str, Sequence[int]]) -> None:
    for name, tokens in requests.items():
        drafter.replace(name, int32(tokens))


def append(drafter: Drafter, name: str, tokens: Sequence[int]) -> None:
    """Append to a known request."""
    context = len(drafter.tokens(name)) + len(tokens)
    assert drafter.update([name], int32(tokens), np.array([0]), np.array([len(tokens)]), int32([context])) == []


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
        assert (batch.kinds[b, :n] % KINDS).max(initial=0) < PASS_KINDS


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
        recycle_megabytes: float = 0,
    ) -> None:
        self.scoring = scoring
        self.vocab_size = vocab_size
        options = {"scoring": scoring, "weights": weights, "recycle_megabytes": recycle_megabytes}
        self.drafter = Drafter(vocab_size=vocab_size, max_nodes=max_nodes, **options)  # type: ignore[arg-type]
        self.weights = Weights.load(weights)
        self.tenants: dict[str, int] = {}
        self.logits: dict[int, oracle.Logits] = defaultdict(dict)
        self.requests: dict[str, list[int]] = {}
        self.use(sub_indices)

    def use(self, sub_indices: Sequence[Documents]) -> None:
        self.drafter.use(snapshot_of(sub_indices, self.vocab_size))
        self.store = oracle.OracleStore([joined(documents) for documents in sub_indices], self.vocab_size)

    def extend(self, requests: dict[str, Sequence[int]]) -> None:
        """Make requests hold these tokens as an engine's adapter does: by `update`, and `replace` where it refuses."""
        flat, starts, stale = [7], [], []  # new tokens last request first, with others between them
        for row, (name, tokens) in reversed(list(enumerate(requests.items()))):
            held = self.requests.get(name, [])
            grown = name in self.requests and list(tokens[: len(held)]) == held
            starts.append(len(flat))
            flat += [*map(int, tokens[len(held) if grown else 0 :]), 7]
            stale += [] if grown else [row]
        begins = np.array(starts[::-1], np.int64)
        ends = np.array([*starts[1:], len(flat)][::-1], np.int64) - 1
        contexts = int32([len(tokens) for tokens in requests.values()])
        names = list(requests)
        assert self.drafter.update(names, int32(flat), begins, ends, contexts) == stale[::-1]
        for row in stale:
            self.drafter.replace(names[row], int32(requests[names[row]]))
        self.requests |= {name: list(map(int, tokens)) for name, tokens in requests.items()}

    def append(self, new: dict[str, Sequence[int]]) -> None:
        self.extend({name: [*self.requests.get(name, []), *tokens] for name, tokens in new.items()})

    def recycle(self, names: Sequence[str], batch: DraftBatch, tokens: NDArray, log_probs: NDArray) -> None:
        """The target has verified these trees: int32 and float32 [B, N, TOP]."""
        self.drafter.recycle(NodeLogits(names, batch, tokens, log_probs))
        for b, name in enumerate(names):
            request = self.requests.get(name, [])
            if not request or request[-1] != batch.tokens[b, 0]:
                continue
            paths: list[list[int]] = [[]]
            for i in range(int(batch.counts[b])):
                if i:
                    paths.append([*paths[batch.parents[b, i]], int(batch.tokens[b, i])])
                known = self.logits[self.tenants.get(name, 0)]
                oracle.remember(known, request + paths[i], tokens[b, i].tolist(), log_probs[b, i].tolist())

    def finish(self, name: str) -> None:
        self.requests.pop(name, None)
        self.drafter.finish([name])

    def compare(self, names: Sequence[str] | None = None, **options) -> DraftBatch:
        """Draft with both; the compiled drafter's batch, once it has proved equal."""
        names = list(self.requests) if names is None else list(names)
        options = {"max_nodes": self.drafter.max_nodes, **options}
        self.drafter._index.catch_up(1 << 30)  # as after some steps
        batch = self.drafter.draft(names, **options)
        requests = [self.requests.get(name, []) for name in names]
        if self.scoring == "paper":
            literal_trie.check(batch, self.store, requests, **options)
            return batch
        trees = []
        for name, request in zip(names, requests, strict=True):
            logits = self.logits[self.tenants.get(name, 0)]
            one = oracle.Oracle(self.store, request, self.weights, logits, options["max_nodes"])
            trees.append(one.tree(options.get("shape") == "chain"))
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
