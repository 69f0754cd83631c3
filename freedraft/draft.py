"""`DraftBatch`: a batch of drafts, passed from drafters to engines."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from freedraft.cost.allocation import limit


@dataclass(frozen=True, slots=True)
class DraftBatch:
    """A batch of draft trees as flat arrays; a chain is a tree without branches.

    Node 0 is the root: the request's last token, already accepted but not yet in the KV cache. Parents come before
    their children, so one forward scan over the nodes visits every path from the root down. Entries at and beyond
    `counts[b]` are undefined.
    """

    tokens: NDArray[np.int32]  # [B, N]
    parents: NDArray[np.int32]  # [B, N], node of each node's parent; -1 for the root
    depths: NDArray[np.int32]  # [B, N], 0 for the root
    # [B, N], estimated probability that verification accepts the node (and so its whole path); 1 for the root, never
    # above the parent's
    scores: NDArray[np.float32]
    counts: NDArray[np.int32]  # [B], number of nodes, root included; 0 where the request has no token to extend
    # [B, N]. The lowest seven bits are what acceptance is learnt by: a drafter's own (source, match length) below 112,
    # draft passes from it on. The others are the drafter's own.
    kinds: NDArray[np.uint16]

    @classmethod
    def empty(cls, batch_size: int, max_nodes: int) -> DraftBatch:
        """Trees without nodes, with room for `max_nodes` each, roots included."""
        shape = (batch_size, max_nodes)
        tokens, parents, depths = np.zeros((3, *shape), np.int32)
        scores, kinds = np.zeros(shape, np.float32), np.zeros(shape, np.uint16)
        return cls(tokens, parents, depths, scores, np.zeros(batch_size, np.int32), kinds)

    @classmethod
    def roots(cls, roots: NDArray[np.int32]) -> DraftBatch:
        """Trees of roots only; roots: int32 [B], each request's newest token."""
        draft = cls.empty(len(roots), 1)
        draft.tokens[:, 0], draft.parents[:], draft.scores[:], draft.counts[:] = roots, -1, 1.0, 1
        return draft

    @property
    def batch_size(self) -> int:
        return self.tokens.shape[0]

    @property
    def max_nodes(self) -> int:
        return self.tokens.shape[1]

    @property
    def draft_tokens(self) -> int:
        return int(np.maximum(self.counts - 1, 0).sum())

    def limit(self, capacities: NDArray[np.int32], trees: NDArray[np.bool_]) -> None:
        """Cut drafts that may not be trees to their chains of first children, then all to their capacities; see
        `Step`. Raises ValueError: the draft is of another number of requests."""
        if not len(capacities) == len(trees) == self.batch_size:
            raise ValueError(f"{self.batch_size} drafts for {len(capacities)} requests")
        limit((self.tokens, self.parents, self.depths, self.scores, self.kinds), self.counts, capacities, trees)

    def copy(self) -> DraftBatch:
        return DraftBatch(*(getattr(self, name).copy() for name in self.__slots__))

    def head(self, batch_size: int) -> DraftBatch:
        """The first `batch_size` requests, as views of the same memory."""
        return DraftBatch(*(getattr(self, name)[:batch_size] for name in self.__slots__))

    def chain(self, row: int) -> list[int]:
        """Draft tokens of `row`, root excluded, in order. Raises ValueError if the tree of this row has a branch."""
        n = int(self.counts[row])
        if n > 1 and not np.array_equal(self.parents[row, 1:n], np.arange(n - 1, dtype=np.int32)):
            raise ValueError(f"row {row} is a tree with branches, not a chain")
        return self.tokens[row, 1:n].tolist() if n else []

    def check(self) -> None:
        """Raise `ValueError` at the first broken invariant. For tests and debugging, not for the hot path."""
        shape = self.tokens.shape
        if (
            any(a.shape != shape for a in (self.parents, self.depths, self.scores, self.kinds))
            or self.counts.shape != shape[:1]
        ):
            raise ValueError("arrays of a DraftBatch differ in shape")
        for b in range(shape[0]):
            n = int(self.counts[b])
            if not 0 <= n <= shape[1]:
                raise ValueError(f"row {b}: {n} nodes in room for {shape[1]}")
            if n == 0:
                continue
            if self.parents[b, 0] != -1 or self.depths[b, 0] != 0 or self.scores[b, 0] != 1.0:
                raise ValueError(f"row {b}: node 0 is not a root (parent -1, depth 0, score 1)")
            siblings: set[tuple[int, int]] = set()
            for i in range(1, n):
                parent, token = int(self.parents[b, i]), int(self.tokens[b, i])
                if not 0 <= parent < i:
                    raise ValueError(f"row {b} node {i}: parent {parent} does not come before it")
                if self.depths[b, i] != self.depths[b, parent] + 1:
                    raise ValueError(f"row {b} node {i}: depth is not its parent's plus one")
                if token < 0:
                    raise ValueError(f"row {b} node {i}: token {token} is negative")
                if not 0.0 <= self.scores[b, i] <= self.scores[b, parent] * (1 + 1e-6):
                    raise ValueError(f"row {b} node {i}: score {self.scores[b, i]} exceeds its parent's or is not >= 0")
                if (parent, token) in siblings:
                    raise ValueError(f"row {b} node {i}: its parent has the child token {token} twice")
                siblings.add((parent, token))
