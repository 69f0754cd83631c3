"""`Drafter`: n-gram drafts for a batch of requests, one compiled call per step."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from freedraft.draft import DraftBatch
from sssd_plugin import paper, provenance
from sssd_plugin.datastore.index.sub_index import Snapshot
from sssd_plugin.datastore.live.store import SEARCHED, LiveDatastore, View
from sssd_plugin.fusion import LEARNED, PAPER, draft_batch
from sssd_plugin.learned import FEATURES, SHORTLIST, Weights, scratch
from sssd_plugin.request_index import RequestIndex

Scoring = Literal["learned", "paper"]
Shape = Literal["tree", "chain"]

MAX_NODES = 256


class Drafter:
    """Drafts from each request's own tokens and a datastore snapshot. State is keyed by request id.

    Safe to call from several threads: calls are serialised.

    Args:
        vocab_size: of the model; the snapshot must not hold larger ids (`Datastore.open` sees to it).
        max_nodes: largest tree per request that `draft` will be asked for, root included.
        scoring: `learned` (calibrated probabilities) or `paper` (papers/sssd.txt, Algorithms 1-3).
        weights: file of the learned scorer's weights; None for the ones that ship with the package.
        snapshot: the datastore; None for none.
        live: a datastore that grows; it then brings the static one along, and `snapshot` must be None.

    Raises:
        ValueError: an argument out of range, or an unreadable weights file.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_nodes: int,
        scoring: Scoring = "learned",
        weights: Path | None = None,
        snapshot: Snapshot | None = None,
        live: LiveDatastore | None = None,
    ) -> None:
        if not 1 <= max_nodes <= MAX_NODES:
            raise ValueError(f"max_nodes must be 1..{MAX_NODES}, not {max_nodes}")
        if not 1 <= vocab_size <= 2**31:
            raise ValueError(f"vocab_size must be 1..2^31, not {vocab_size}")
        if scoring not in ("learned", "paper"):
            raise ValueError(f"scoring must be 'learned' or 'paper', not {scoring!r}")
        self.vocab_size = vocab_size
        self.max_nodes = max_nodes
        self._scoring = LEARNED if scoring == "learned" else PAPER
        self._weights = Weights.load(weights).values if scoring == "learned" else np.zeros((1, FEATURES))
        self._index = RequestIndex()
        self._lock = threading.Lock()
        self._prompts: dict[str, Future[None]] = {}
        self._worker: ThreadPoolExecutor | None = None
        self._batch = DraftBatch.empty(1, max_nodes)
        self._live = live
        self._tenants: dict[str, int] = {}  # of requests that have one
        self._no_groups = np.zeros(1, np.int64)
        self._no_features = np.zeros((0, SHORTLIST, FEATURES))
        self._no_ints = np.zeros((1, 0), np.int32)
        self._no_floats = np.zeros((0, SHORTLIST))
        if live is None:
            self.use(Snapshot.empty() if snapshot is None else snapshot)
        else:
            self._see(live.view()[0])
        self._warm_up()

    def use(self, snapshot: Snapshot) -> None:
        """Draft from `snapshot`, and what is learnt, from the next call on."""
        if self._live is not None:
            self._live.use_static(snapshot)
            return
        view = View.of(snapshot)
        with self._lock:
            self._snapshot = snapshot
            self._see(view)

    def _see(self, view: View) -> None:
        """Draft from `view`, with scratch space for it."""
        room = view.widest if self._live is None else max(view.widest, SEARCHED)
        if self._scoring == LEARNED:
            ints, floats, counts = scratch(self.max_nodes, room)
        else:
            ints, floats = np.zeros(paper.INTS, np.int32), np.zeros(paper.FLOATS)
            counts = np.zeros((1, 1), np.uint8)
        self._view, self._room = view, room
        self._scratch = ints, floats, counts

    def _look(self, live: LiveDatastore, request_ids: Sequence[str]) -> NDArray[np.int64] | None:
        """See the live datastore as it is now; the group of each request, None where all are in group 0."""
        tenants = None
        if self._tenants:
            of = self._tenants
            tenants = np.array([of.get(request_id, 0) for request_id in request_ids], np.int64)
        view, groups = live.view(tenants)
        if view.widest > self._room:
            self._see(view)
        self._view = view
        return groups

    def belongs(self, request_id: str, tenant: int) -> None:
        """The request is a tenant's (`LiveDatastore.tenant`) and drafts from what that may see, until it finishes."""
        if tenant:
            self._tenants[request_id] = tenant

    def tenant_of(self, request_id: str) -> int:
        """What `belongs` said of a request; 0 for none."""
        return self._tenants.get(request_id, 0)

    def tokens(self, request_id: str) -> NDArray[np.int32]:
        """A copy of the tokens of a request: int32 [n], none if it is unknown."""
        self._await_prompts([request_id])
        with self._lock:
            if request_id not in self._index:
                return np.zeros(0, np.int32)
            return self._index.tokens(request_id).copy()

    def extend(
        self,
        request_ids: Sequence[str],
        token_rows: NDArray[np.int32],
        rows: NDArray[np.int32],
        lengths: NDArray[np.int32],
    ) -> None:
        """Make request b hold `token_rows[rows[b], :lengths[b]]`. Only new tokens are read; unknown requests start.

        Args:
            request_ids: B ids.
            token_rows: int32 [R, L], C-contiguous rows.
            rows: int32 [B].
            lengths: int32 [B], each at most L.
        """
        if self._prompts:  # a prompt that is indexed after this would take back what is added here
            self._await_prompts(request_ids)
        with self._lock:
            self._index.extend(self._index.slot_ids(request_ids), token_rows, rows, lengths)

    def append(self, request_ids: Sequence[str], tokens: NDArray[np.int32], offsets: NDArray[np.int64]) -> None:
        """Append `tokens[offsets[b]:offsets[b + 1]]` to request b. tokens: int32 [T]; offsets: int64 [B + 1]."""
        self._await_prompts(request_ids)
        with self._lock:
            self._index.append(self._index.slot_ids(request_ids), tokens, offsets)

    def begin(self, request_id: str, prompt: NDArray[np.int32]) -> None:
        """Start a request with `prompt` (int32 [n]) in the background thread; all calls for it wait."""
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, "freedraft-index")
        prompt = np.array(prompt, np.int32)
        self._prompts[request_id] = self._worker.submit(self._begin, request_id, prompt)

    def draft(
        self,
        request_ids: Sequence[str],
        *,
        max_nodes: int,
        total_draft_tokens: int | None = None,
        shape: Shape = "tree",
        min_score: float = 0.0,
    ) -> DraftBatch:
        """The best trees, or chains, for these requests.

        Args:
            request_ids: B ids; one that is unknown or holds no token gets a tree of 0 nodes.
            max_nodes: per request, root included.
            total_draft_tokens: over the whole batch, roots not counted; the nodes of the highest scores get them.
            shape: `chain` gives every node at most one child.
            min_score: leave out nodes whose score does not exceed this.

        Returns:
            A DraftBatch of B rows: views that the next call overwrites.

        Raises:
            ValueError: max_nodes out of range.
        """
        if not 1 <= max_nodes <= self.max_nodes:
            raise ValueError(f"max_nodes must be 1..{self.max_nodes}, not {max_nodes}")
        if self._prompts:
            self._await_prompts(request_ids)
        with self._lock:
            groups = None if self._live is None else self._look(self._live, request_ids)
            slot_ids = self._index.slot_ids(request_ids, create=False)
            if len(slot_ids) > self._batch.batch_size:
                self._batch = DraftBatch.empty(2 * len(slot_ids), self.max_nodes)
                self._no_groups = np.zeros(2 * len(slot_ids), np.int64)
            if groups is None:
                groups = self._no_groups
            view = self._view
            out = self._batch
            total = -1 if total_draft_tokens is None else max(0, total_draft_tokens)
            draft_batch(
                self._scoring, self._index.slots, slot_ids, view.table, view.bounds, view.sizes, groups, self._weights,
                max_nodes, total, shape == "chain", min_score,
                out.tokens, out.parents, out.depths, out.scores, out.counts, out.kinds,
                *self._scratch,
                self._no_features, self._no_ints, self._no_floats,
            )  # fmt: skip
        return out.head(len(slot_ids))

    def account(self, request_ids: Sequence[str], gained: NDArray[np.int64], tally: NDArray[np.int64]) -> None:
        """Add to `tally` (`sssd_plugin.provenance`) where the tokens come from that these requests have just gained.

        Args:
            gained: int64 [B], tokens of the last step, all but the last of them drafted.
        """
        self._await_prompts(request_ids)
        with self._lock:
            groups = None if self._live is None else self._look(self._live, request_ids)
            slot_ids = self._index.slot_ids(request_ids, create=False)
            groups = np.zeros(len(slot_ids), np.int64) if groups is None else groups
            view = self._view
            provenance.account(
                self._index.slots, slot_ids, view.table, view.bounds, groups, view.static_rows, gained, tally
            )

    def length(self, request_id: str) -> int:
        """Tokens indexed for a request; 0 if it is unknown."""
        return self._index.length(request_id)

    def finish(self, request_ids: Iterable[str]) -> None:
        """Forget requests. Unknown ids are ignored."""
        request_ids = list(request_ids)
        self._await_prompts(request_ids)
        if self._tenants:
            for request_id in request_ids:
                self._tenants.pop(request_id, None)
        with self._lock:
            self._index.finish(request_ids)

    def request_ids(self) -> list[str]:
        """Requests held."""
        return self._index.request_ids()

    def __len__(self) -> int:
        return len(self._index)

    def close(self) -> None:
        """Stop the background threads, forget every request and close the live datastore."""
        if self._worker is not None:
            self._worker.shutdown(wait=True)
            self._worker = None
        self._prompts.clear()
        self.finish(self._index.request_ids())
        if self._live is not None:
            self._live.close()

    def _begin(self, request_id: str, prompt: NDArray[np.int32]) -> None:
        with self._lock:
            self._index.finish([request_id])
            slot_ids = self._index.slot_ids([request_id])
            self._index.append(slot_ids, prompt, np.array([0, len(prompt)], np.int64))

    def _await_prompts(self, request_ids: Iterable[str]) -> None:
        if self._prompts:
            for request_id in request_ids:
                future = self._prompts.pop(request_id, None)
                if future is not None:
                    future.result()

    def _warm_up(self) -> None:
        """Compile, or load from the cache, everything that a step calls."""
        name = "\0warm-up"
        self.extend([name], np.zeros((1, 1), np.int32), np.zeros(1, np.int32), np.ones(1, np.int32))
        self.append([name], np.zeros(200, np.int32), np.array([0, 200], np.int64))
        self.draft([name], max_nodes=min(2, self.max_nodes), total_draft_tokens=1)
        self.account([name], np.ones(1, np.int64), np.zeros(provenance.SIZE, np.int64))
        self.finish([name])
