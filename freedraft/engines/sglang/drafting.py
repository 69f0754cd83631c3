"""`BatchDrafting`: builds steps from SGLang's batches, passes them to a method and returns its drafts;
`AcceptedTokens`: asynchronous host copies of the tokens that each step accepts; `EarlyFutureMap`: SGLang's relay to
the next step."""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.managers.overlap_utils import FutureMap

from freedraft.draft import DraftBatch
from freedraft.engines.copies import Copied, LogitsCopy, to_host
from freedraft.engines.sglang.requests import UNTRACKED, Tracked, extra_of, output_of, tenant_of, tokens_of
from freedraft.guarded_method import GuardedMethod
from freedraft.step import Step, room


class Gained(NamedTuple):
    """Tokens accepted by the last step: request b has `tokens[starts[b]:ends[b]]`, at least one. tokens: int32 [T];
    starts, ends: int64 [B]; seq_lens: int64 [B], tokens of each request in the KV cache, excluding the newest one."""

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]
    seq_lens: NDArray[np.int64]


class AcceptedTokens:
    """Newest accepted tokens of all requests, by row of SGLang's request pool. Those of each step go to the host in one
    asynchronous copy, queued right after verification. max_nodes: N, maximum number of tokens accepted per request and
    step."""

    def __init__(self, rows: int, max_nodes: int) -> None:
        self._arrived = np.zeros((rows, 2 + max_nodes), np.int32)
        self._copies = deque[tuple[NDArray[np.int64], Copied]]()  # with their rows, oldest first

    def put(self, rows: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Store the tokens accepted for B requests and start the copy. rows: int64 [B], on the host; tokens: int32
        [B, N]; lengths: int32 [B], number of valid tokens; seq_lens: int [B]."""
        self._store_arrived(wait=False)
        step = torch.cat((lengths[:, None], seq_lens[:, None].to(torch.int32), tokens), 1)
        self._copies.append((rows.numpy().copy(), to_host(step)))

    def read(self, rows: NDArray[np.int64]) -> Gained:
        """Wait for the copies and return the tokens of the requests in pool rows `rows` [B]."""
        self._store_arrived(wait=True)
        found = self._arrived[rows]
        starts = np.arange(len(rows)) * found.shape[1] + 2
        return Gained(found.ravel(), starts, starts + found[:, 0], found[:, 1].astype(np.int64))

    def _store_arrived(self, *, wait: bool) -> None:
        while self._copies and (wait or self._copies[0][1].arrived()):
            rows, copied = self._copies.popleft()
            self._arrived[rows] = copied.wait()


NOTHING = np.zeros(0, np.int32)


class BatchDrafting:
    """Drafting of one scheduler, in its tensor-parallel rank 0. B requests, N = maximum nodes of a request.

    State is kept by request id, never by batch row.

    Args:
        widths: supported numbers of nodes per request, root included; ascending.
        trees: whether drafts may be trees.
    """

    def __init__(
        self, guarded: GuardedMethod, widths: Sequence[int], max_batch: int, accepted: AcceptedTokens, *,
        trees: bool,
    ) -> None:  # fmt: skip
        self.guarded, self.accepted = guarded, accepted
        self._trees = trees
        self._widths = np.array(widths, np.int32)
        self._max_running = 4 * max_batch + 64  # a chunked or retracted request waits outside of the batch
        self._requests: dict[str, Tracked] = {}
        self._states: dict[str, torch.Tensor] = {}  # float [H] on the device, after the prompt
        self._drafted: dict[str, int] = {}  # draft tokens in verification, by request
        self._previous: tuple[int, int] | None = None
        self._logits = LogitsCopy()
        self._awaited: Any = None  # tokens of the last step, and what `_look_up` found; None if that failed
        self._rests = False  # whether the method drafts nothing for this step and takes its tokens later

    def keep_widths(self, widths: Sequence[int]) -> None:
        """Restrict verification to `widths`, those that could be prepared."""
        self._widths = np.array(widths, np.int32)
        if (controller := self.guarded.method.controller).widths is not None:
            controller.widths = self._widths

    # -- requests ------------------------------------------------------------------------------------------------------

    def begin(self, requests: Sequence[Any]) -> None:
        """Track requests at each chunk of their prefill; after a retraction, with their output so far."""
        with self.guarded:
            # SGLang does not report requests that end with their prefill.
            for request_id in [i for i, tracked in self._requests.items() if tracked.request.finished()]:
                self.finish(request_id)
            for request in requests:
                tracked = self._requests.get(request.rid, UNTRACKED)
                length = len(request.origin_input_ids) + len(request.output_ids)
                if tracked.request is not request or tracked.length != length:
                    self._track(request)
                    self._begin(request, tokens_of(request))

    def _track(self, request: Any) -> None:
        self._requests[request.rid] = Tracked.of(request)
        self._drafted.pop(request.rid, None)

    def _begin(self, request: Any, tokens: NDArray[np.int32]) -> None:
        self.guarded.begin(request.rid, tokens, tenant_of(request), extra_of(request))

    def keep_states(self, requests: Sequence[Any], states: torch.Tensor) -> None:
        """Store the last hidden state of each prompt, up to the chunk just read. states: float [B, H]."""
        for request, state in zip(requests, states, strict=True):
            if not request.output_ids:  # not one that was retracted during decoding
                self._states[request.rid] = state

    def finish(self, request_id: str) -> None:
        """Finish a request that SGLang has released."""
        request = self._requests.get(request_id, UNTRACKED).request
        self._forget(request_id, None if request is None else partial(output_of, request))

    def _forget(self, request_id: str, output: Callable[[], NDArray[np.int32]] | None) -> None:
        for held in (self._requests, self._states, self._drafted):
            held.pop(request_id, None)
        self.guarded.finish(request_id, output)

    def _sweep(self, ids: Sequence[str]) -> None:
        """Finish requests outside of this step if far more are tracked than can run: SGLang does not report requests
        aborted in its queue. A request that is still queued is added again at its next prefill."""
        if len(self.guarded.running) > self._max_running:
            for request_id in self.guarded.running - set(ids):
                self._forget(request_id, None)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Record that work other than decoding runs: the time until the next step is not that of a decoding step."""
        self._previous = None

    def copy_logits(self, batch: Any, draft: DraftBatch, logits: torch.Tensor) -> None:
        """Copy the logits of all nodes that this step verifies, if the method uses them. logits: float [B * n, V]."""
        if self.guarded.needs_logits:
            ids = [request.rid for request in batch.reqs]
            with self.guarded:
                self._logits.put(ids, draft, logits)

    def receive_step(self, batch: Any) -> torch.Tensor:
        """Look up the requests of SGLang's next ScheduleBatch, and wait for the tokens of the previous step, which
        may still be running. Returns the number of tokens in the KV cache of each request, int64 [B]."""
        ids = [request.rid for request in batch.reqs]
        same = self._previous == (len(ids), len(ids)) and list(self._drafted) == ids
        self._rests, known = same and self.guarded.rests(), None
        with self.guarded:
            known = None if self._rests else self._look_up(batch.reqs, ids)
        gained = self.accepted.read(batch.req_pool_indices_cpu.numpy())
        if known is None:
            self._logits = LogitsCopy()  # of a text that the next draft does not continue
        if self._rests:
            padding = [self._requests.get(i, UNTRACKED).padding for i in ids]
            self.guarded.keep(ids, gained.tokens[gained.ends - 1], gained.seq_lens + 1 - padding)
        self._awaited = gained, known
        return torch.tensor(gained.seq_lens)

    def _look_up(self, requests: Sequence[Any], ids: Sequence[str]) -> tuple[Any, ...]:
        """Track new requests; return their rows, the numeric fields of each `Tracked` and its draft tokens in
        verification."""
        new = [row for row, r in enumerate(requests) if r.rid not in self._requests and not r.finished()]
        for row in new:
            self._track(requests[row])
        self._sweep(ids)
        tracked = np.array([self._requests.get(i, UNTRACKED)[1:] for i in ids], np.int64)
        return new, tracked, np.fromiter((self._drafted.get(i, 0) for i in ids), np.int32, len(ids))

    def draft(self, batch: Any) -> DraftBatch:
        """Return trees [B, n] for SGLang's ScheduleBatch, n the smallest prepared width that holds all of them; roots
        only if drafting fails."""
        if self._awaited is None:
            self.receive_step(batch)
        (gained, known), self._awaited = self._awaited, None
        draft = None
        with self.guarded:
            draft = None if known is None else self._propose(batch, gained, *known)
        if draft is None:
            roots = gained.tokens[gained.ends - 1]
            draft = self._padded(DraftBatch.roots(roots), roots)
        return draft

    def _propose(
        self, batch: Any, gained: Gained, new: Sequence[int], tracked: NDArray[np.int64], drafted: NDArray[np.int32]
    ) -> DraftBatch | None:
        node_logits = self._logits.take()
        step = self._step(batch, gained, tracked, drafted)
        for row in new:
            self._begin(batch.reqs[row], step.history(row)[: -int(step.gained[row])])
        if node_logits is not None:
            with self.guarded:
                self.guarded.method.recycle(node_logits)
        if states := {i: self._states.pop(i) for i in step.request_ids if i in self._states}:
            self.guarded.set_prompt_states(states, torch.stack(list(states.values())))
        proposed = self.guarded.step(step)
        return None if proposed is None else self._padded(proposed, step.roots)

    def note(self, batch: Any, draft: DraftBatch) -> None:
        """Record a step after its verification was launched, so that the device does not wait for this work."""
        self.guarded.settle()
        for request in batch.reqs:
            if request.finished():  # with a grammar, SGLang runs a request once more after its end
                self._forget(request.rid, lambda: NOTHING)
        if not self._rests:  # otherwise, as in the step before
            self._drafted = dict(zip((r.rid for r in batch.reqs), (draft.counts - 1).tolist(), strict=True))
            self._previous = draft.tokens.shape[0], draft.tokens.size

    def _step(self, batch: Any, gained: Gained, tracked: NDArray[np.int64], drafted: NDArray[np.int32]) -> Step:
        requests = list(batch.reqs)
        tokens, starts, ends, seq_lens = gained
        _, padding, least, limits = tracked.T
        lengths = seq_lens + 1  # the root is not in the KV cache
        contexts = (lengths - padding).astype(np.int32)

        def history(b: int) -> NDArray[np.int32]:
            # Under overlap scheduling `output_ids` lacks what the last step accepted.
            before = tokens_of(requests[b])[: contexts[b] - (ends[b] - starts[b])]
            return np.concatenate((before, tokens[starts[b] : ends[b]]))

        limits = np.where(lengths < least, 0, limits)
        return Step(
            request_ids=[request.rid for request in requests], tokens=tokens, starts=starts, ends=ends,
            contexts=contexts, capacities=room(limits, lengths, int(self._widths[-1]) - 1, trees=self._trees),
            drafted=drafted, previous=self._previous, history=history,
            trees=np.full(len(requests), self._trees), engine=batch,
        )  # fmt: skip

    def _padded(self, draft: DraftBatch, roots: NDArray[np.int32]) -> DraftBatch:
        """Pad drafts to the smallest prepared width. roots: int32 [B], the engine's, which replace those of the
        method."""
        if draft.counts.max() <= 1 == self._widths[0]:
            return DraftBatch.roots(roots)
        counts = np.maximum(draft.counts, 1)
        width = int(self._widths[np.searchsorted(self._widths, counts.max())])
        out = DraftBatch.empty(len(counts), width)
        kept = min(width, draft.max_nodes)
        for name in ("tokens", "parents", "depths"):
            getattr(out, name)[:, :kept] = getattr(draft, name)[:, :kept]
        np.minimum(counts, kept, out=out.counts)
        out.tokens[:, 0], out.parents[:, 0], out.depths[:, 0] = roots, -1, 0
        return out


class EarlyFutureMap(FutureMap):
    """Under overlap scheduling, SGLang schedules a step while the previous one runs, then waits here for its lengths.
    On the drafting rank they come with the accepted tokens, by one copy and one wait; other ranks use SGLang's copy."""

    spec_algo: Any  # our `TreeAlgorithm`
    needs_cpu_seq_lens: bool

    def resolve_seq_lens_cpu(self, batch: Any, *args: Any, **kwargs: Any) -> None:
        drafted_for = batch.forward_mode.is_decode() and batch.reqs and self.spec_algo.receive_step is not None
        lengths = self.spec_algo.receive_step(batch) if drafted_for else None
        relayed = batch.spec_info is not None and batch.spec_info.future_indices is not None
        if lengths is None or not relayed or not self.needs_cpu_seq_lens:
            return super().resolve_seq_lens_cpu(batch, *args, **kwargs)
        self.needs_cpu_seq_lens = False
        try:
            super().resolve_seq_lens_cpu(batch, *args, **kwargs)
        finally:
            self.needs_cpu_seq_lens = True
        batch.seq_lens_cpu, batch.seq_lens_sum = lengths, int(lengths.sum())
