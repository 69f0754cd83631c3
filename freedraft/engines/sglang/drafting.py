"""`Drafting`: passes SGLang's requests and steps to a method, and takes its drafts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from freedraft.draft import DraftBatch
from freedraft.draft_thread import DraftThread
from freedraft.engines.logits_copy import LogitsCopy
from freedraft.engines.sglang.accepted import AcceptedTokens, Gained, OneCopy
from freedraft.engines.sglang.requests import (
    drafted_from,
    extra_of,
    longest_answer,
    output_of,
    padding_of,
    tenant_of,
    tokens_of,
    was_aborted,
)
from freedraft.guarded_method import GuardedMethod
from freedraft.step import Step

NOTHING = np.zeros(0, np.int32)


class Known(NamedTuple):
    """A request as it began: SGLang's, its number of tokens, the tokens more that its image padding takes in the KV
    cache, from which number of generated tokens on it may have drafts, and how many it may generate."""

    request: Any
    length: int
    padding: int
    drafted_from: int
    longest: int


UNKNOWN = Known(None, 0, 0, 0, 0)


class NextStep(NamedTuple):
    """A step whose requests are known, and not yet what the last one accepted.

    Attributes:
        batch: SGLang's ScheduleBatch; requests, ids: B; rows: int64 [B], of the requests' pool.
        known: int64 [B, 4], the numbers of each `Known`.
        states: prompt states that have not been told, by id; drafted, previous: see `Step`.
    """

    batch: Any
    requests: list[Any]
    ids: list[str]
    rows: NDArray[np.int64]
    accepted: OneCopy
    known: NDArray[np.int64]
    new: list[int]
    logits: LogitsCopy
    states: dict[str, torch.Tensor]
    drafted: NDArray[np.int32]
    previous: tuple[int, int] | None


class Drafting:
    """The drafts of one scheduler, in its tensor-parallel rank 0. B requests, N = most nodes of a request.

    State is kept by request id, never by batch row. A method on the host may draft in a `DraftThread`: the scheduler's
    thread then prepares a step while the last one is still being verified, and takes the drafts when it needs them.

    Args:
        widths: the numbers of nodes per request, root included, that are prepared to be verified; ascending.
        chains: whether trees are cut to chains.
    """

    def __init__(
        self,
        guarded: GuardedMethod,
        widths: Sequence[int],
        max_batch: int,
        accepted: AcceptedTokens,
        *,
        chains: bool = False,
    ) -> None:
        self.guarded = guarded
        self.accepted = accepted
        self._chains = chains
        self._widths = np.array(widths, np.int32)
        self._max_running = 4 * max_batch + 64
        self._requests: dict[str, Known] = {}
        self._states: dict[str, torch.Tensor] = {}  # float [H] on the device, behind prompts
        self._drafted: dict[str, int] = {}  # draft tokens that the newest step verifies, by request
        self._previous: tuple[int, int] | None = None
        self._logits = LogitsCopy()
        timeout = guarded.method.draft_timeout
        # Prompt states are computed on the stream of the engine's thread.
        threaded = timeout > 0.0 and not guarded.needs_prompt_states
        self._thread = DraftThread(timeout, guarded.metrics.late.inc) if threaded else None
        self._next: NextStep | None = None
        self._drafts: Any = None  # of the next step, in the thread

    def keep_widths(self, widths: Sequence[int]) -> None:
        """Restrict verification to these widths, which could be prepared."""
        self._widths = np.array(widths, np.int32)
        if (controller := self.guarded.method.controller).widths is not None:
            controller.widths = self._widths

    # -- requests ------------------------------------------------------------------------------------------------------

    def begin(self, requests: Sequence[Any]) -> None:
        """Prefill starts, or goes on with a later chunk; of a request that was retracted, with its output so far."""

        def begin_each() -> None:
            # SGLang does not tell of those that have ended with their prefill.
            for request_id in [i for i, known in self._requests.items() if known.request.finished()]:
                self.finish(request_id)
            for request in requests:
                known = self._requests.get(request.rid, UNKNOWN)
                length = len(request.origin_input_ids) + len(request.output_ids)
                if known.request is not request or known.length != length:
                    self._know(request)
                    self._tell(self._begin(request, tokens_of(request)))

        self.guarded.call(begin_each)

    def _know(self, request: Any) -> None:
        length = len(request.origin_input_ids) + len(request.output_ids)
        numbers = length, padding_of(request), drafted_from(request), longest_answer(request)
        self._requests[request.rid] = Known(request, *numbers)
        self._drafted.pop(request.rid, None)

    def _begin(self, request: Any, tokens: NDArray[np.int32]) -> Callable[[], None]:
        """The call that tells the method; the request is read now."""
        return partial(self.guarded.begin, request.rid, tokens, tenant_of(request), extra_of(request))

    def _tell(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            work()
        else:
            self._thread.call(work)

    def take_states(self, requests: Sequence[Any], states: torch.Tensor) -> None:
        """float [B, H]: the last hidden states behind prompts, as far as these have been read."""
        for request, state in zip(requests, states, strict=True):
            if not request.output_ids:  # not one that was retracted in the midst of its output
                self._states[request.rid] = state

    def finish(self, request_id: str) -> None:
        """SGLang is done with a request."""
        request = self._requests.get(request_id, UNKNOWN).request
        ended = None if request is None else self.guarded.call(lambda: (output_of(request), was_aborted(request)))
        self._forget(request_id, *(ended or (None, False)))

    def _forget(self, request_id: str, output: NDArray[np.int32] | None, aborted: bool) -> None:
        for held in (self._requests, self._states, self._drafted):
            held.pop(request_id, None)
        self._tell(partial(self.guarded.finish, request_id, output, aborted))

    def _sweep(self, ids: Sequence[str]) -> None:
        """Finish what is not in this step if far more requests are known than can run: SGLang does not tell of those
        that were aborted while they waited. One that still waits begins anew with its next prefill."""
        if len(self.guarded.running) > self._max_running:
            for request_id in self.guarded.running - set(ids):
                self._forget(request_id, None, True)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def interrupt(self) -> None:
        """Something else than decoding runs, so that the time until the next step is not that of a decoding step."""
        self._previous = None

    def take_logits(self, batch: Any, draft: DraftBatch, logits: torch.Tensor) -> None:
        """float [B * n, V]: what the model says at each node of the trees that this step verifies."""
        if self.guarded.needs_logits:
            ids = [request.rid for request in batch.reqs]
            self.guarded.call(lambda: self._logits.put(ids, draft, logits))

    def prepare(self, batch: Any) -> torch.Tensor:
        """A decoding step of SGLang's ScheduleBatch is next; the last one may still be running, and is waited for.
        Returns its requests' tokens in the KV cache, int64 [B]."""
        self._next = step = self.guarded.call(partial(self._next_step, batch))
        if self._thread is not None and step is not None:
            self._drafts = self._thread.start(partial(self._draft, step))
            if self._drafts is None:  # late ones are still being made: what this step brings is not lost
                for row in step.new:
                    self._tell(self._begin(step.requests[row], tokens_of(step.requests[row])))
                self._tell(partial(self.guarded.call, partial(self._take_in, step)))
        return torch.from_numpy(self.accepted.newest.read(batch.req_pool_indices_cpu.numpy()).seq_lens)

    def draft(self, batch: Any) -> DraftBatch:
        """Trees [B, n] for SGLang's ScheduleBatch, where n is the smallest prepared width that holds them all. Whatever
        fails in making them, or takes too long, leaves the roots."""
        if self._next is None:
            self.prepare(batch)
        step, drafts = self._next, self._drafts
        self._next = self._drafts = None
        draft = None
        if step is not None:
            draft = self._draft(step) if self._thread is None else self._thread.result(drafts)
        if draft is None:
            gained = self.accepted.newest.read(batch.req_pool_indices_cpu.numpy())
            roots = gained.tokens[gained.ends - 1]
            draft = self._widened(DraftBatch.roots(roots), np.ones(len(roots), np.int32), roots)
        for request in batch.reqs:
            if request.finished():  # with a grammar, SGLang runs a request once more after its end
                self._forget(request.rid, NOTHING, was_aborted(request))
        self._drafted = dict(zip((r.rid for r in batch.reqs), (draft.counts - 1).tolist(), strict=True))
        self._previous = draft.tokens.shape[0], draft.tokens.size
        return draft

    def _next_step(self, batch: Any) -> NextStep:
        ids = [request.rid for request in batch.reqs]
        new = [row for row, r in enumerate(batch.reqs) if r.rid not in self._requests and not r.finished()]
        for row in new:
            self._know(batch.reqs[row])
        self._sweep(ids)
        logits, self._logits = self._logits, LogitsCopy()
        known = [self._requests.get(request_id, UNKNOWN)[1:] for request_id in ids]
        return NextStep(
            batch=batch,
            requests=list(batch.reqs),
            ids=ids,
            rows=batch.req_pool_indices_cpu.numpy(),
            accepted=self.accepted.newest,
            known=np.array(known, np.int64),
            new=new,
            logits=logits,
            states={i: self._states.pop(i) for i in ids if i in self._states} if self._states else {},
            drafted=np.fromiter((self._drafted.get(i, 0) for i in ids), np.int32, len(ids)),
            previous=self._previous,
        )

    # -- where the method runs -----------------------------------------------------------------------------------------

    def _draft(self, step: NextStep) -> DraftBatch | None:
        return self.guarded.call(partial(self._draft_unguarded, step))

    def _draft_unguarded(self, upcoming: NextStep) -> DraftBatch | None:
        step = self._step(upcoming, upcoming.accepted.read(upcoming.rows))
        for row in upcoming.new:
            self._begin(upcoming.requests[row], step.history(row)[: -int(step.gained[row])])()
        self._take_in(upcoming)
        proposed = self.guarded.draft(step)
        return None if proposed is None else self._cut(step, proposed)

    def _take_in(self, upcoming: NextStep) -> None:
        """Tell the method what the last step's logits and the prompts before this one say."""
        if (logits := upcoming.logits.take()) is not None:
            self.guarded.recycle(logits)
        if upcoming.states:
            states = torch.stack(list(upcoming.states.values())).float().cpu().numpy()
            for request_id, state in zip(upcoming.states, states, strict=True):
                self.guarded.set_prompt_state(request_id, state)

    def _step(self, upcoming: NextStep, gained: Gained) -> Step:
        tokens, starts, ends, seq_lens = gained
        began, padding, least, longest = upcoming.known.T
        lengths = seq_lens + 1  # the root is not in the KV cache
        generated = lengths - began
        most = self._widths[-1] - 1
        # The last token of a request comes after all drafts; a tree may be as wide as ever before it.
        room = np.where(generated < least, 0, longest - generated - 1).clip(0, most)
        if not self._chains:
            room[room > 0] = most
        contexts = (lengths - padding).astype(np.int32)

        def history(b: int) -> NDArray[np.int32]:
            # Under overlap scheduling `output_ids` lacks what the last step accepted.
            before = tokens_of(upcoming.requests[b])[: contexts[b] - (ends[b] - starts[b])]
            return np.concatenate((before, tokens[starts[b] : ends[b]]))

        return Step(
            request_ids=upcoming.ids,
            tokens=tokens,
            starts=starts,
            ends=ends,
            contexts=contexts,
            capacities=room.astype(np.int32),
            drafted=upcoming.drafted,
            widths=self._widths,
            previous=upcoming.previous,
            history=history,
            engine=upcoming.batch,
        )

    def _cut(self, step: Step, draft: DraftBatch) -> DraftBatch:
        counts = np.clip(draft.counts, 1, step.capacities + 1)
        if self._chains:
            follows = draft.parents[:, 1:] == np.arange(draft.max_nodes - 1)
            np.minimum(counts, 1 + np.logical_and.accumulate(follows, 1).sum(1), out=counts)
        return self._widened(draft, counts, step.roots)

    def _widened(self, draft: DraftBatch, counts: NDArray[np.int32], roots: NDArray[np.int32]) -> DraftBatch:
        """Trees of as many nodes as `counts` says, at the smallest prepared width. counts, roots: int32 [B]."""
        width = int(self._widths[np.searchsorted(self._widths, counts.max())])
        out = DraftBatch.empty(len(counts), width)
        kept = min(width, draft.max_nodes)
        for name in ("tokens", "parents", "depths"):
            getattr(out, name)[:, :kept] = getattr(draft, name)[:, :kept]
        np.minimum(counts, kept, out=out.counts)
        # The root comes from the engine, whatever the method holds.
        out.tokens[:, 0], out.parents[:, 0], out.depths[:, 0] = roots, -1, 0
        return out
