"""`Drafter`: n-gram drafts for a batch of requests, one compiled call per step."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from freedraft.compiled import compiled
from freedraft.cost.acceptance import KINDS
from freedraft.draft import DraftBatch
from freedraft.step import NodeLogits, rows_in
from sssd_plugin import recycled_logits
from sssd_plugin.datastore.index.runs import View
from sssd_plugin.datastore.index.sub_index import Snapshot
from sssd_plugin.datastore.live.store import LiveStore
from sssd_plugin.options import Scoring
from sssd_plugin.recycled_logits import TOP
from sssd_plugin.request_index import OUTSIDE, RequestIndex
from sssd_plugin.scoring.candidates import size_of_scratch
from sssd_plugin.scoring.learned import (
    GROUP,
    PREDICTED,
    PREDICTED_END,
    REQUEST_COLUMNS,
    SLOT,
    TENANT,
    draft_batch,
)
from sssd_plugin.scoring.weights import Weights
from sssd_plugin.sources import OTHER, SOURCES

Shape = Literal["tree", "chain"]

MAX_NODES = 256
MAX_THREADS = 8
MOST_INDEXED = 1 << 14  # tokens of prompts per step, so that a long one does not keep others waiting
BEFORE = 16  # tokens of the prompt behind which a predicted answer begins
# Seconds of a tree, at most, and of waking other threads, at first and at most: more is another program's time.
MOST_DRAFTING, WAKING, MOST_WAKING = 1e-4, 1e-4, 1e-3


class Drafter:
    """Drafts from each request's own tokens, a datastore snapshot, learnt texts and recycled logits. Its state is keyed
    by request id.

    Thread-safe: calls are serialised. Images in prompts are never drafted, and none matches another.

    Args:
        vocab_size: of the model; the snapshot must not have larger ids (`Datastore.open` checks it).
        max_nodes: largest tree per request that `draft` may return, root included.
        scoring: `learned` (calibrated probabilities) or `paper` (arXiv 2411.05894, Algorithms 1-3).
        weights: file of the learned scorer's weights; None: the shipped ones.
        snapshot: the datastore; empty for none.
        live: a growing datastore, which includes the static one; `snapshot` must then be empty.
        marks: ids that stand for images, as those outside the vocabulary do.
        recycle_megabytes: memory for recycled logits, with scoring "learned"; 0 for none.

    Attributes:
        sourced: int64 [2, 6], draft tokens verified and accepted, by SOURCES; the caller may reset it.

    Raises:
        ValueError: an argument is out of range, or the weights file is unreadable.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_nodes: int,
        scoring: Scoring = "learned",
        weights: Path | None = None,
        snapshot: Snapshot = (),
        live: LiveStore | None = None,
        marks: Sequence[int] = (),
        recycle_megabytes: float = 0.0,
    ) -> None:
        if not 1 <= max_nodes <= MAX_NODES:
            raise ValueError(f"max_nodes must be 1..{MAX_NODES}, not {max_nodes}")
        self.vocab_size, self.max_nodes, self._marks = vocab_size, max_nodes, np.array(marks, np.int32)
        self._weights = None
        if scoring == "learned":
            loaded = Weights.load(weights)
            self._weights = loaded.layer, loaded.out, loaded.copies
        self.sourced = np.zeros((2, len(SOURCES)), np.int64)
        self._drafted_for: Sequence[str] = ()
        self._entries = recycled_logits.entries(recycle_megabytes)
        self._recycle_clock = np.zeros(1, np.int64)
        self._tenants: dict[str, int] = {}  # tenants, by request
        # By request: where in its tokens others stand that are not its own, and these.
        self._inserted: dict[str, tuple[int, NDArray[np.int32]]] = {}
        self._index, self._may_index = RequestIndex(), MOST_INDEXED
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(MAX_THREADS, "freedraft-draft")
        self._batch = self._out = DraftBatch.empty(1, max_nodes)
        self._memory = list[NDArray[np.uint8]]()  # for `scratch`, one for each thread
        self._widest = -1  # number of sub-indices that it is large enough for
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._threads = min(MAX_THREADS, cores)
        self._drafting, self._waking = 0.0, WAKING  # measured seconds of a tree, and of waiting for other threads
        self._live = live
        if live is not None:
            live.runs.on_erased = self._forget_others
        self._view = View.of(snapshot) if live is None else live.runs.view_of()
        self._warm_up()

    def use(self, snapshot: Snapshot) -> None:
        """Replace the static snapshot, from the next call on; learnt text is still used."""
        if self._live is not None:
            self._live.runs.use_static(snapshot)
            return
        with self._lock:
            self._view = View.of(snapshot)

    def set_tenant(self, request_id: str, tenant: int) -> None:
        """Draft for the request from texts and logits of this tenant (`tenant_number`; 0: of requests without one)
        alone, until it finishes. Negative: this request shares with nobody."""
        if tenant:
            self._tenants[request_id] = tenant
        else:
            self._tenants.pop(request_id, None)

    def predict(self, request_id: str, prompt: NDArray[np.int32], answer: NDArray[np.int32]) -> None:
        """Draft for the request as if its prompt had been answered so before; call it before `replace`. Both are int32
        [n]."""
        self._inserted.pop(request_id, None)
        if len(answer):
            again = [OUTSIDE], prompt[max(0, len(prompt) - BEFORE) :]  # so that the answer begins behind the same text
            self._inserted[request_id] = len(prompt), np.concatenate([answer, *again]).astype(np.int32)

    def recycle(self, logits: NodeLogits) -> None:
        if len(self._entries) == 0:
            return
        ids, draft, known = logits.request_ids, logits.draft, logits.contexts
        trees, likeliest = (draft.tokens, draft.parents, draft.counts), (logits.top_tokens, logits.top_log_probs)
        with self._lock:
            contexts = np.full(len(ids), -1) if known is None else self._with_inserted(ids, known.astype(np.int64))
            requests = self._index.slot_ids(ids), _values(self._tenants, ids), contexts
            recycled_logits.put_trees(
                self._index.slots, requests, self._entries, trees, likeliest, self.vocab_size, self._recycle_clock
            )

    def update(
        self, request_ids: Sequence[str], tokens: NDArray[np.int32], starts: NDArray[np.int64],
        ends: NDArray[np.int64], contexts: NDArray[np.int32], drafted: NDArray[np.int32] | None = None,
    ) -> list[int]:  # fmt: skip
        """Append new tokens: `tokens[starts[b]:ends[b]]` (contiguous), after which request b has `contexts[b]` tokens.
        drafted: int32 [B], tokens of the last `draft` that were verified, to count them; their arrays, except counts,
        must not have changed.

        Returns:
            Rows left unchanged, because their request would have another number of tokens (it is unknown, was rolled
            back, or missed tokens). The caller passes all tokens of these to `replace`.
        """
        with self._lock:
            if drafted is not None:
                out, step = self._out, (drafted, tokens, starts, ends)
                draft, rows = (out.tokens, out.parents, out.counts, out.kinds), rows_in(self._drafted_for, request_ids)
                _count_sources(self.sourced, draft, rows, step)
            self._may_index = MOST_INDEXED
            if self._index.behind:
                self._index.catch_up(MOST_INDEXED // 2)
                self._may_index //= 2
            contexts = self._with_inserted(request_ids, contexts)
            return self._index.update(self._index.slot_ids(request_ids), tokens, starts, ends, contexts)

    def replace(self, request_id: str, tokens: NDArray[np.int32]) -> None:
        """Set the tokens (int32 [n]) of a request, known or not. Long ones are indexed over the next calls of `update`,
        MOST_INDEXED tokens in each."""
        at, others = self._inserted.get(request_id, (0, tokens[:0]))
        tokens = np.concatenate([tokens[:at], others, tokens[at:]]).astype(np.int32, copy=False)
        images = (tokens < 0) | (tokens >= self.vocab_size) | np.isin(tokens, self._marks)
        if images.any():  # each gets an id of its own
            tokens = np.where(images, OUTSIDE - np.cumsum(np.diff(images, prepend=False), dtype=np.int32), tokens)
        with self._lock:
            self._may_index -= self._index.replace(request_id, tokens, self._may_index)

    def draft(self, request_ids: Sequence[str], *, max_nodes: int, shape: Shape = "tree") -> DraftBatch:
        """Draft the best trees, or chains, for these requests.

        Args:
            request_ids: an unknown or empty request gets a tree of 0 nodes.
            max_nodes: per request, root included.
            shape: `chain` gives every node at most one child.

        Returns:
            Views that the next call overwrites. Nodes are in order of descending score, so any prefix of a row is a
            tree, too.

        Raises:
            ValueError: max_nodes is out of range.
        """
        if not 1 <= max_nodes <= self.max_nodes:
            raise ValueError(f"max_nodes must be 1..{self.max_nodes}, not {max_nodes}")
        with self._lock:
            n = len(request_ids)
            if n != self._out.batch_size:
                if n > self._batch.batch_size:
                    self._batch = DraftBatch.empty(2 * n, self.max_nodes)
                self._out = self._batch.head(n)
            self._drafted_for = list(request_ids)
            out, asked = self._out, np.zeros((n, REQUEST_COLUMNS), np.int64)
            asked[:, SLOT] = self._index.slot_ids(request_ids)
            if self._tenants:
                asked[:, TENANT] = _values(self._tenants, request_ids)
            if self._live is not None:
                self._view, asked[:, GROUP] = self._live.runs.view(asked[:, TENANT])
            self._write_predicted(request_ids, asked)
            arrays = asked, out.tokens, out.parents, out.depths, out.scores, out.counts, out.kinds
            view, limits = self._view, (max_nodes, shape == "chain")
            arrays_of_view = view.table, view.bounds, view.widest
            same: tuple[Any, ...] = self._index.slots, arrays_of_view, self._entries, limits, self._weights
            if view.widest > self._widest:
                size = size_of_scratch(self.max_nodes, view.widest)
                self._memory, self._widest = [np.zeros(size, np.uint8) for _ in range(self._threads)], view.widest
            parts = min(self._threads, n, int(n * self._drafting / (2 * self._waking)))
            if parts <= 1:
                self._waking += 0.01 * (WAKING - self._waking)  # so that it is tried again
                self._draft_timed(arrays, self._memory[0], same)
            else:
                bounds = [n * i // parts for i in range(parts + 1)]
                first, *others = (tuple(array[a:b] for array in arrays) for a, b in pairwise(bounds))
                memory = iter(self._memory)
                waiting = [self._pool.submit(draft_batch, other, next(memory), *same) for other in others]
                try:
                    self._draft_timed(first, next(memory), same)
                finally:
                    began = time.perf_counter()
                    wait(waiting)  # no draft begins while one still has memory
                    self._waking += 0.2 * (min(time.perf_counter() - began, MOST_WAKING) - self._waking)
                for future in waiting:
                    future.result()
        return out

    def _draft_timed(self, arrays: Any, memory: NDArray[np.uint8], same: tuple[Any, ...]) -> None:
        began = time.perf_counter()
        draft_batch(arrays, memory, *same)
        seconds = (time.perf_counter() - began) / max(1, len(arrays[0]))
        self._drafting += 0.2 * (min(seconds, MOST_DRAFTING) - self._drafting)

    def tokens(self, request_id: str, first: int = 0, most: int = 1 << 31) -> NDArray[np.int32]:
        """Return a copy of the tokens of a request from its `first` one on, the last `most` of them: int32 [n], none if
        it is unknown."""
        with self._lock:
            tokens, (at, others) = self._index.tokens(request_id), self._inserted.get(request_id, (0, ()))
            first = max(first, len(tokens) - len(others) - most)
            return np.concatenate([tokens[first:at], tokens[max(first, at) + len(others) :]])

    def finish(self, request_ids: Iterable[str]) -> None:
        """Forget requests. Unknown ids are ignored."""
        request_ids = list(request_ids)
        for request_id in request_ids:
            self._tenants.pop(request_id, None)
            self._inserted.pop(request_id, None)
        with self._lock:
            self._index.finish(request_ids)

    def __len__(self) -> int:
        return len(self._index.request_ids())

    def close(self) -> None:
        """Stop the background threads, forget every request and close the live datastore; may be called twice."""
        self._pool.shutdown()
        self.finish(self._index.request_ids())
        if self._live is not None:
            self._live.close()

    def _with_inserted(self, request_ids: Sequence[str], contexts: NDArray[Any]) -> NDArray[Any]:
        """Context lengths with the tokens that are not the requests' own."""
        if not self._inserted:
            return contexts
        return contexts + np.array([len(self._inserted.get(name, ((), ()))[1]) for name in request_ids], contexts.dtype)

    def _write_predicted(self, request_ids: Sequence[str], asked: NDArray[np.int64]) -> None:
        for row, request_id in enumerate(request_ids if self._inserted else ()):
            if request_id in self._inserted:
                at, others = self._inserted[request_id]
                asked[row, [PREDICTED, PREDICTED_END]] = at, at + len(others) - 1 - min(BEFORE, at)

    def _forget_others(self) -> None:
        """After an erasure: drop the last view, and all recycled logits, since their age is unknown."""
        with self._lock:
            self._entries[:] = 0
            if self._live is not None:
                self._view = self._live.runs.view_of()

    def _warm_up(self) -> None:
        name, one = "\0warm-up", np.ones(1, np.int64)
        self.replace(name, np.zeros(200, np.int32))
        self.update([name], np.zeros(1, np.int32), 0 * one, one, np.array([201], np.int32), np.zeros(1, np.int32))
        self.draft([name], max_nodes=min(2, self.max_nodes))
        none = np.zeros((0, 1, TOP), np.int32)
        self.recycle(NodeLogits([], self._out.head(0), none, none.astype(np.float32)))
        self.finish([name])
        self._drafting = 0.0


def _values(numbers: dict[str, int], request_ids: Sequence[str]) -> NDArray[np.int64]:
    """int64 [B]: the number of each request, 0 for none."""
    if not numbers:
        return np.zeros(len(request_ids), np.int64)
    return np.array([numbers.get(request_id, 0) for request_id in request_ids], np.int64)


@compiled(nogil=True)
def _count_sources(totals, draft, rows, step):
    """Add to int64 [2, 6] what requests verified and accepted of their last drafts, by SOURCES. rows: int32 [B], of
    each request in the draft; -1: not known any more, so of source other. draft, step: as unpacked below."""
    (tokens, parents, counts, kinds), (drafted, new, starts, ends) = draft, step
    for b in range(len(rows)):
        row, node = rows[b], 0
        n = counts[row] if row >= 0 else 0
        for i in range(1, drafted[b] + 1):
            totals[0, kinds[row, i] // KINDS if i < n else OTHER] += 1
        for at in range(starts[b], starts[b] + min(ends[b] - starts[b] - 1, drafted[b])):
            i = node + 1
            while i < n and not (parents[row, i] == node and tokens[row, i] == new[at]):
                i += 1
            totals[1, kinds[row, i] // KINDS if i < n else OTHER] += 1
            node = i
