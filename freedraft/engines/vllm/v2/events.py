"""`RequestEvents`: requests begin, end and lose their slots before a step is launched; that is looked at behind it,
when the last step's tokens are there without a wait."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freedraft.engines.vllm.tenants import SALT
from freedraft.engines.vllm.v2.requests import NO_SLOT, Requests
from freedraft.guarded_method import GuardedMethod


class RequestEvents:
    """Those since the newest step, in their order. guarded: the method that hears of them; requests: what is known
    of requests; states: vLLM's RequestState; in_prompt: ids of requests whose prompt is not over, where the method
    wants the hidden states behind prompts."""

    def __init__(self, guarded: GuardedMethod, requests: Requests, states: Any) -> None:
        self._guarded, self._requests, self._states = guarded, requests, states
        self._waiting: list[Callable[[], None]] = []
        self._begun: list[int] = []  # slots that they are about
        self.in_prompt: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def begin(self, requests: Sequence[Any]) -> None:
        """vLLM's NewRequestData have got slots: new ones, or such as were preempted."""
        slots = [self._states.req_id_to_index[request.req_id] for request in requests]
        self._begun += slots
        self._waiting.append(partial(self._begin, requests, slots))

    def end(self, finished: Iterable[str], preempted: Iterable[str]) -> None:
        """These requests have ended, and those have lost their slots."""
        ids, slotless = [*finished], [*preempted]
        if ids or slotless:
            self._waiting.append(partial(self._end, ids, slotless))

    def of_others(self, slots: NDArray[np.intp]) -> NDArray[np.bool_]:
        """bool [B], whether what is known of these slots is of requests that had them before."""
        return np.isin(slots, self._begun)

    def look(self) -> None:
        """The newest step's tokens have been taken. One event that fails keeps no other."""
        while self._waiting:
            self._guarded.call(self._waiting.pop(0))
        self._begun.clear()

    def _begin(self, requests: Sequence[Any], slots: list[int]) -> None:
        for request, slot in zip(requests, slots, strict=True):
            if self._requests.slots.get(request.req_id, NO_SLOT) != NO_SLOT:  # an id that starts anew: streamed input
                self._end([request.req_id], ())
            if getattr(request, "prompt_embeds", None) is not None:  # its tokens are not known
                continue
            tokens = self._requests.add(
                request.req_id, slot, request.prefill_token_ids, request.prompt_len, request.sampling_params
            )
            extra = getattr(request.sampling_params, "extra_args", None)
            self._guarded.begin(request.req_id, tokens, getattr(request, SALT, None) or None, extra)
            if self._guarded.needs_prompt_states:
                self.in_prompt.add(request.req_id)

    def _end(self, finished: Iterable[str], preempted: Iterable[str]) -> None:
        for request_id in finished:
            self.in_prompt.discard(request_id)
            self._guarded.finish(request_id, self._guarded.call(partial(self._requests.finish, request_id)))
        for request_id in preempted:
            self._guarded.call(partial(self._requests.preempt, request_id))
