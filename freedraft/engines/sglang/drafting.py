"""`Drafting`: what a method is told of SGLang's requests, and what it drafts for them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from freedraft.draft import DraftBatch
from freedraft.engines.logits_copy import LogitsCopy
from freedraft.engines.sglang.requests import (
    counts_tokens_of_a_step,
    extra_of,
    output_of,
    padding_of,
    tenant_of,
    tokens_of,
    was_aborted,
)
from freedraft.guarded_method import GuardedMethod
from freedraft.method import Step

NOTHING = np.zeros(0, np.int32)


class Gained(NamedTuple):
    """The tokens that the last step accepted: `tokens[starts[b]:ends[b]]` of request b, at least one."""

    tokens: NDArray[np.int32]
    starts: NDArray[np.int64]
    ends: NDArray[np.int64]


class Drafting:
    """The drafts of one scheduler, in its tensor-parallel rank 0. B requests, N = most nodes of a request.

    State is kept by request id, never by batch row.

    Args:
        guarded: the method.
        widths: the numbers of nodes per request, root included, that are prepared to be verified; ascending.
        max_batch: most requests in a batch.
        chains: whether trees are cut to chains.
    """

    def __init__(self, guarded: GuardedMethod, widths: Sequence[int], max_batch: int, *, chains: bool = False) -> None:
        self.guarded = guarded
        self._chains = chains
        self._widths = np.array(widths, np.int32)
        self._max_running = 4 * max_batch + 64
        self._requests: dict[str, tuple[Any, int]] = {}  # as they began: SGLang's request, its number of tokens
        self._states: dict[str, torch.Tensor] = {}  # float [H] on the device, behind prompts
        self._drafted: dict[str, int] = {}  # draft tokens that the newest step verifies, by request
        self._previous: tuple[int, int] | None = None
        self._logits = LogitsCopy()

    # -- requests ------------------------------------------------------------------------------------------------------

    def begin(self, requests: Sequence[Any]) -> None:
        """Prefill starts, or goes on with a later chunk; of a request that was retracted, with its output so far."""

        def begin_each() -> None:
            for request in requests:
                began, length = self._requests.get(request.rid, (None, 0))
                if began is not request or length != len(request.origin_input_ids) + len(request.output_ids):
                    self._begin(request, tokens_of(request))

        self.guarded.call(begin_each)

    def _begin(self, request: Any, tokens: NDArray[np.int32]) -> None:
        length = len(request.origin_input_ids) + len(request.output_ids)
        self._requests[request.rid] = request, length
        self._drafted.pop(request.rid, None)
        self.guarded.begin(request.rid, tokens, tenant_of(request), extra_of(request))

    def take_states(self, requests: Sequence[Any], states: torch.Tensor) -> None:
        """float [B, H]: the last hidden states behind prompts, as far as these have been read."""
        for request, state in zip(requests, states, strict=True):
            if not request.output_ids:  # not one that was retracted in the midst of its output
                self._states[request.rid] = state

    def finish(self, request_id: str) -> None:
        """SGLang is done with a request."""
        request, _ = self._requests.get(request_id, (None, 0))
        ended = None if request is None else self.guarded.call(lambda: (output_of(request), was_aborted(request)))
        self._forget(request_id, *(ended or (None, False)))

    def _forget(self, request_id: str, output: NDArray[np.int32] | None, aborted: bool) -> None:
        for held in (self._requests, self._states, self._drafted):
            held.pop(request_id, None)
        self.guarded.finish(request_id, output, aborted)

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

    def draft(self, batch: Any) -> DraftBatch:
        """Trees [B, n] for SGLang's ScheduleBatch, where n is the smallest prepared width that holds them all. Whatever
        fails in making them leaves the roots."""
        spec = batch.spec_info
        tokens, lengths = spec.accept_tokens.cpu().numpy(), spec.accept_lens.cpu().numpy()
        starts = np.arange(0, len(tokens), len(tokens) // len(batch.reqs))
        gained = Gained(tokens.astype(np.int32, copy=False), starts, starts + lengths)
        draft = self.guarded.call(partial(self._draft, batch, gained))
        if draft is None:
            draft = DraftBatch.roots(gained.tokens[gained.ends - 1])
        self._drafted = dict(zip((r.rid for r in batch.reqs), (draft.counts - 1).tolist(), strict=True))
        self._previous = draft.tokens.shape[0], draft.tokens.size
        return draft

    def _draft(self, batch: Any, gained: Gained) -> DraftBatch | None:
        if (logits := self._logits.take()) is not None:
            self.guarded.recycle(logits)
        step = self._step(batch, gained)
        proposed = self.guarded.draft(step)
        for request in batch.reqs:
            if request.finished():  # with a grammar, SGLang runs a request once more after its end
                self._forget(request.rid, NOTHING, was_aborted(request))
        return None if proposed is None else self._cut(step, proposed)

    def _step(self, batch: Any, gained: Gained) -> Step:
        requests = batch.reqs
        tokens, starts, ends = gained
        ids = [request.rid for request in requests]
        padding = np.fromiter(map(padding_of, requests), np.int64, len(ids))
        lengths = batch.seq_lens_cpu.numpy() + 1  # the root is not in the KV cache
        contexts = (lengths - padding).astype(np.int32)

        def history(b: int) -> NDArray[np.int32]:
            # Under overlap scheduling `output_ids` lacks what the last step accepted.
            before = tokens_of(requests[b])[: contexts[b] - (ends[b] - starts[b])]
            return np.concatenate((before, tokens[starts[b] : ends[b]]))

        for b, request in enumerate(requests):
            if request.rid not in self._requests and not request.finished():
                self._begin(request, history(b)[: starts[b] - ends[b]])
        self._sweep(ids)
        if waiting := [request_id for request_id in ids if request_id in self._states]:
            states = torch.stack([self._states.pop(request_id) for request_id in waiting]).float().cpu().numpy()
            for request_id, state in zip(waiting, states, strict=True):
                self.guarded.set_prompt_state(request_id, state)
        capacities = np.full(len(ids), self._widths[-1] - 1, np.int32)
        for b, request in enumerate(requests):
            _, began = self._requests.get(request.rid, (None, 0))
            if counts_tokens_of_a_step(request, int(lengths[b]) - began):
                capacities[b] = 0
        return Step(
            request_ids=ids,
            tokens=tokens,
            starts=starts,
            ends=ends,
            contexts=contexts,
            capacities=capacities,
            drafted=np.fromiter((self._drafted.get(i, 0) for i in ids), np.int32, len(ids)),
            widths=self._widths,
            previous=self._previous,
            history=history,
            engine=batch,
        )

    def _cut(self, step: Step, draft: DraftBatch) -> DraftBatch:
        size = step.batch_size
        counts = np.clip(draft.counts, 1, step.capacities + 1)
        if self._chains:
            follows = draft.parents[:, 1:] == np.arange(draft.max_nodes - 1)
            np.minimum(counts, 1 + np.logical_and.accumulate(follows, 1).sum(1), out=counts)
        width = int(self._widths[np.searchsorted(self._widths, counts.max())])
        out = DraftBatch.empty(size, width)
        kept = min(width, draft.max_nodes)
        for name in ("tokens", "parents", "depths"):
            getattr(out, name)[:, :kept] = getattr(draft, name)[:, :kept]
        np.minimum(counts, kept, out=out.counts)
        # The root comes from the engine, whatever the method holds.
        out.tokens[:, 0], out.parents[:, 0], out.depths[:, 0] = step.roots, -1, 0
        return out
