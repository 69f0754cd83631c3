"""`Drafter`: n-gram drafts for a batch of requests, one compiled call per step."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from freedraft.compiled import compiled
from freedraft.draft import DraftBatch
from freedraft.step import NodeLogits
from sssd_plugin import recycled_logits
from sssd_plugin.datastore.index.runs import View
from sssd_plugin.datastore.index.sub_index import Snapshot
from sssd_plugin.datastore.live.store import SEARCHED, LiveStore
from sssd_plugin.options import Scoring
from sssd_plugin.recycled_logits import TOP, Recycled
from sssd_plugin.request_index import OUTSIDE, RequestIndex, request_at
from sssd_plugin.scoring import attribution, candidates, learned, paper
from sssd_plugin.scoring.views import Store, Tree
from sssd_plugin.scoring.weights import Weights

Shape = Literal["tree", "chain"]

MAX_NODES = 256
MAX_THREADS = 4
MIN_ROWS = 8  # requests that are worth a thread of their own


@compiled(nogil=True)
def _draft_batch(slots, arrays, view, how, weights, learned_scratch, paper_scratch):
    """Fill a `DraftBatch` for the requests of a batch; a slot of -1 gets a tree of 0 nodes.

    Bundles cross from Python as plain tuples, which are faster there than named ones.

    Args:
        slots: `RequestIndex.slots`.
        arrays: int64 [B] each, slots, groups in the view, owners of recycled logits; those of the `DraftBatch`.
        view: table, bounds, sizes and static_rows of a `View`.
        how: recycled logits' entries, none to draft without; max_nodes, chain, min_score as in `learned.draft_tree`.
        weights, learned_scratch, paper_scratch: of the scorers; None for the one that is not used.
    """
    slot_ids, groups, owners, tokens, parents, depths, scores, counts, kinds = arrays
    table, bounds, sizes, static_rows = view
    entries, max_nodes, chain, min_score = how
    for b in range(len(slot_ids)):
        counts[b] = 0
        if slot_ids[b] < 0:
            continue
        request = request_at(slots, slot_ids[b])
        group = groups[b]
        store = Store(table[bounds[group] : bounds[group + 1]], sizes[group], static_rows[group])
        tree = Tree(tokens[b], parents[b], depths[b], scores[b], kinds[b])
        if learned_scratch is not None:
            counts[b] = learned.draft_tree(
                request, store, Recycled(entries, owners[b]), weights, max_nodes, chain, min_score, tree,
                candidates.Scratch(*learned_scratch), None,
            )  # fmt: skip
        if paper_scratch is not None:
            counts[b] = paper.draft_tree(
                request, store.table, max_nodes, chain, min_score, tree, paper.Scratch(*paper_scratch)
            )


@compiled(nogil=True)
def _recycle_batch(
    slots, slot_ids, entries, owners, tokens, parents, counts, top_tokens, top_log_probs, vocab_size, clock
):
    """Keep the logits of every node of the trees of the requests in `slot_ids`, where these still end in the root."""
    context, keys = np.zeros(recycled_logits.ORDERS, np.int32), np.zeros(recycled_logits.ORDERS, np.uint64)
    clock[0] += 1
    for b in range(len(slot_ids)):
        if slot_ids[b] < 0:
            continue
        known = request_at(slots, slot_ids[b]).tokens
        if len(known) > 0 and known[-1] == tokens[b, 0]:
            recycled_logits.put_tree(
                Recycled(entries, owners[b]), known, tokens[b], parents[b], counts[b], top_tokens[b], top_log_probs[b],
                vocab_size, context, keys, clock[0],
            )  # fmt: skip


class Drafter:
    """Drafts from each request's own tokens and a datastore snapshot. Its state is keyed by request id.

    It is safe to call from several threads: calls are serialised. Ids that the vocabulary does not have, as prompts
    with images hold, match each other and are never drafted: the model could not embed them.

    Args:
        vocab_size: of the model; the snapshot must not hold larger ids (`Datastore.open` sees to it).
        max_nodes: largest tree per request that `draft` will be asked for, root included.
        scoring: `learned` (calibrated probabilities) or `paper` (arXiv 2411.05894, Algorithms 1-3).
        weights: file of the learned scorer's weights; None for the ones that ship with the package.
        snapshot: the datastore; None for none.
        live: a datastore that grows; it then brings the static one along, and `snapshot` must be None.
        recycle_megabytes: memory for recycled logits, with scoring "learned"; 0 for none.

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
        snapshot: Snapshot | None = None,
        live: LiveStore | None = None,
        recycle_megabytes: float = 0.0,
    ) -> None:
        if not 1 <= max_nodes <= MAX_NODES:
            raise ValueError(f"max_nodes must be 1..{MAX_NODES}, not {max_nodes}")
        if not 1 <= vocab_size <= 2**31:
            raise ValueError(f"vocab_size must be 1..2^31, not {vocab_size}")
        if scoring not in ("learned", "paper"):
            raise ValueError(f"scoring must be 'learned' or 'paper', not {scoring!r}")
        self.vocab_size = vocab_size
        self.max_nodes = max_nodes
        self._weights = None
        if scoring == "learned":
            loaded = Weights.load(weights)
            self._weights = loaded.layer, loaded.out
        self._entries = recycled_logits.entries(recycle_megabytes)
        self._recycle_clock = np.zeros(1, np.int64)
        self._owners: dict[str, int] = {}  # of requests whose logits are not everyone's
        self._index = RequestIndex()
        self._lock = threading.Lock()
        self._prompts: dict[str, Future[None]] = {}
        self._worker, self._pool = _executors()
        self._batch = self._out = DraftBatch.empty(1, max_nodes)
        self._live = live
        self._tenants: dict[str, int] = {}  # of requests that have one
        self._max_sub_indices = -1  # that there is scratch space for
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        self._threads = min(MAX_THREADS, cores)
        self._scratch: list[tuple[tuple | None, tuple | None]] = []  # by thread, of the learned scorer and the paper's
        if live is not None:
            live.on_erased = self._forget_others
        self._set_view(View.of(Snapshot.empty() if snapshot is None else snapshot) if live is None else live.view()[0])
        self._warm_up()

    def use(self, snapshot: Snapshot) -> None:
        """Draft from `snapshot`, and what is learnt, from the next call on."""
        if self._live is not None:
            self._live.use_static(snapshot)
            return
        with self._lock:
            self._set_view(View.of(snapshot))

    def set_tenant(self, request_id: str, tenant: int) -> None:
        """Let the request draft from what its tenant (`LiveStore.tenant`) may see, until it finishes."""
        if tenant:
            self._tenants[request_id] = tenant

    def set_owner(self, request_id: str, owner: int) -> None:
        """Keep and see this request's logits apart from those of other owners (`recycled_logits.owner_of`)."""
        if owner:
            self._owners[request_id] = owner

    def recycle(self, logits: NodeLogits) -> None:
        """Keep the likeliest next tokens at every verified node, before `update` appends what was accepted."""
        if len(self._entries) == 0:
            return
        request_ids, draft = logits.request_ids, logits.draft
        self._await_prompts(request_ids)
        with self._lock:
            _recycle_batch(
                self._index.slots, self._index.slot_ids(request_ids), self._entries, _values(self._owners, request_ids),
                draft.tokens, draft.parents, draft.counts, logits.top_tokens, logits.top_log_probs, self.vocab_size,
                self._recycle_clock,
            )  # fmt: skip

    def tenant_of(self, request_id: str) -> int:
        """Return the tenant of a request; 0 for none."""
        return self._tenants.get(request_id, 0)

    def begin(self, request_id: str, prompt: NDArray[np.int32]) -> None:
        """Start a request with `prompt` (int32 [n]) in the background thread; all calls for it wait."""
        self._prompts[request_id] = self._worker.submit(self._replace, request_id, np.array(prompt, np.int32))

    def update(
        self, request_ids: Sequence[str], tokens: NDArray[np.int32], starts: NDArray[np.int64],
        ends: NDArray[np.int64], contexts: NDArray[np.int32],
    ) -> list[int]:  # fmt: skip
        """Append the tokens that requests have gained: `tokens[starts[b]:ends[b]]` (contiguous), with which request b
        holds `contexts[b]` tokens.

        Returns:
            Rows left untouched, because their request would not hold as many (it is unknown, was rolled back, or missed
            tokens). The caller gives `replace` all tokens of these.
        """
        if self._prompts:  # a prompt that is indexed after this would take back what is added here
            self._await_prompts(request_ids)
        with self._lock:
            return self._index.update(self._index.slot_ids(request_ids), tokens, starts, ends, contexts)

    def replace(self, request_id: str, tokens: NDArray[np.int32]) -> None:
        """Make the request, known or not, hold exactly `tokens` (int32 [n])."""
        self._await_prompts([request_id])
        self._replace(request_id, np.ascontiguousarray(tokens, np.int32))

    def draft(
        self, request_ids: Sequence[str], *, max_nodes: int, shape: Shape = "tree", min_score: float = 0.0
    ) -> DraftBatch:
        """Draft the best trees, or chains, for these requests.

        Args:
            request_ids: one that is unknown or holds no token gets a tree of 0 nodes.
            max_nodes: per request, root included.
            shape: `chain` gives every node at most one child.
            min_score: leave out nodes whose score does not exceed this.

        Returns:
            Views that the next call overwrites. Nodes stand in order of falling score, so any first part of a row is a
            tree, too.

        Raises:
            ValueError: max_nodes is out of range.
        """
        if not 1 <= max_nodes <= self.max_nodes:
            raise ValueError(f"max_nodes must be 1..{self.max_nodes}, not {max_nodes}")
        self._await_prompts(request_ids)
        with self._lock:
            n = len(request_ids)
            if n != self._out.batch_size:
                if n > self._batch.batch_size:
                    self._batch = DraftBatch.empty(2 * n, self.max_nodes)
                self._out = self._batch.head(n)
            out, groups = self._out, self._update_view(request_ids)
            arrays = (
                self._index.slot_ids(request_ids), groups, _values(self._owners, request_ids),
                out.tokens, out.parents, out.depths, out.scores, out.counts, out.kinds,
            )  # fmt: skip
            how = (self._entries, max_nodes, shape == "chain", min_score)
            parts = max(1, min(self._threads, n // MIN_ROWS))
            if parts == 1:
                self._draft_part(0, arrays, how)
            else:
                rows = [slice(n * i // parts, n * (i + 1) // parts) for i in range(parts)]
                split = [tuple(array[r] for array in arrays) for r in rows]
                others = [self._pool.submit(self._draft_part, i, split[i], how) for i in range(1, parts)]
                self._draft_part(0, split[0], how)
                for other in others:
                    other.result()
        return out

    def _draft_part(self, thread: int, arrays: tuple[NDArray[Any], ...], how: tuple[Any, ...]) -> None:
        view = self._view
        of_view = view.table, view.bounds, view.sizes, view.static_rows
        _draft_batch(self._index.slots, arrays, of_view, how, self._weights, *self._scratch[thread])

    def attribute(self, request_ids: Sequence[str], gained: NDArray[np.int64], tally: NDArray[np.int64]) -> None:
        """Add to `tally` which source (`scoring.attribution`) knew the tokens that these requests have just gained:
        `gained` of each (int64 [B]), all but the last of them drafted."""
        self._await_prompts(request_ids)
        with self._lock:
            groups = self._update_view(request_ids)
            view, slot_ids = self._view, self._index.slot_ids(request_ids)
            attribution.attribute(
                self._index.slots, slot_ids, view.table, view.bounds, groups, view.static_rows, gained, tally
            )

    def tokens(self, request_id: str) -> NDArray[np.int32]:
        """Return a copy of the tokens of a request: int32 [n], none if it is unknown."""
        self._await_prompts([request_id])
        with self._lock:
            known = request_id in self._index
            return self._index.tokens(request_id).copy() if known else np.zeros(0, np.int32)

    def finish(self, request_ids: Iterable[str]) -> None:
        """Forget requests. Unknown ids are ignored."""
        request_ids = list(request_ids)
        self._await_prompts(request_ids)
        for request_id in request_ids:
            self._tenants.pop(request_id, None)
            self._owners.pop(request_id, None)
        with self._lock:
            self._index.finish(request_ids)

    def request_ids(self) -> list[str]:
        """Return the ids of the requests held."""
        return self._index.request_ids()

    def __len__(self) -> int:
        return len(self._index)

    def close(self) -> None:
        """Stop the background threads, forget every request and close the live datastore."""
        self._worker.shutdown()
        self._pool.shutdown()
        self._worker, self._pool = _executors()
        self._prompts.clear()
        self.finish(self._index.request_ids())
        if self._live is not None:
            self._live.close()

    def _forget_others(self) -> None:
        """Something learnt was erased: let go of the last view, and of all recycled logits, which do not tell age."""
        with self._lock:
            self._entries[:] = 0
            if self._live is not None:
                self._set_view(self._live.view()[0])

    def _replace(self, request_id: str, tokens: NDArray[np.int32]) -> None:
        if len(tokens) and (int(tokens.min()) < 0 or int(tokens.max()) >= self.vocab_size):
            tokens = np.where((tokens >= 0) & (tokens < self.vocab_size), tokens, np.int32(OUTSIDE))
        with self._lock:
            self._index.replace(request_id, tokens)

    def _await_prompts(self, request_ids: Iterable[str]) -> None:
        if self._prompts:
            for request_id in request_ids:
                future = self._prompts.pop(request_id, None)
                if future is not None:
                    future.result()

    def _set_view(self, view: View) -> None:
        """Draft from `view`, with scratch space for it."""
        self._view = view
        if view.widest > self._max_sub_indices:
            self._max_sub_indices = view.widest if self._live is None else max(view.widest, SEARCHED)
            if self._weights is None:
                self._scratch = [(None, tuple(paper.scratch())) for _ in range(self._threads)]
            else:
                n, j = self.max_nodes, self._max_sub_indices
                self._scratch = [(tuple(candidates.scratch(n, j)), None) for _ in range(self._threads)]

    def _update_view(self, request_ids: Sequence[str]) -> NDArray[np.int64]:
        """See the live datastore, if there is one, as it is now; return the group of each request in the view."""
        groups = None
        if self._live is not None:
            view, groups = self._live.view(_values(self._tenants, request_ids) if self._tenants else None)
            self._set_view(view)
        return np.zeros(len(request_ids), np.int64) if groups is None else groups

    def _warm_up(self) -> None:
        name, one = "\0warm-up", np.ones(1, np.int64)
        self.replace(name, np.zeros(200, np.int32))
        self.update([name], np.zeros(1, np.int32), 0 * one, one, np.array([201], np.int32))
        self.draft([name], max_nodes=min(2, self.max_nodes))
        none = np.zeros((0, 1, TOP), np.int32)
        self.recycle(NodeLogits([], self._out.head(0), none, none.astype(np.float32)))
        self.attribute([name], one, np.zeros(attribution.SIZE, np.int64))
        self.finish([name])


def _executors() -> tuple[ThreadPoolExecutor, ThreadPoolExecutor]:
    return ThreadPoolExecutor(1, "freedraft-index"), ThreadPoolExecutor(MAX_THREADS, "freedraft-draft")


def _values(numbers: dict[str, int], request_ids: Sequence[str]) -> NDArray[np.int64]:
    """int64 [B]: the number of each request, 0 for those that have none."""
    if not numbers:
        return np.zeros(len(request_ids), np.int64)
    return np.array([numbers.get(request_id, 0) for request_id in request_ids], np.int64)
