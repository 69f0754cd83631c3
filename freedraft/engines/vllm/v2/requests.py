"""`Requests`: the tokens of vLLM's running requests on the host, by the slot that model runner V2 gave them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from freedraft.engines.vllm.outputs import longest_answer, output_of

NO_SLOT = -1


class Requests:
    """Tokens by slot, and slots by id.

    Args:
        slots: number of slots; max_model_len: most tokens of a request; length: K, most draft tokens of one.

    Attributes:
        tokens: int32 [slots, max_model_len].
        lengths: int64 [slots], tokens known of each request; -1 where the slot is free.
        most: int64 [slots], the tokens that each request may have at its end.
        drafted: int32 [slots], draft tokens of ours that each request's next step verifies.
        drafted_behind: int64 [slots], the number of the step behind which these were drafted, if any were.
        nodes: int32 [slots, K + 1], the root that these follow, and they themselves.
        parents: int32 [slots, K + 1], as in `DraftBatch`.
        slots: request ids and their slots, NO_SLOT while a request is preempted.
    """

    def __init__(self, slots: int, max_model_len: int, length: int, tokenizer: Any = None) -> None:
        self.tokens: NDArray[np.int32] = np.empty((slots, max_model_len), np.int32)  # pages are taken as they fill
        self.lengths: NDArray[np.int64] = np.full(slots, -1)
        self.most: NDArray[np.int64] = np.zeros(slots, np.int64)
        self.drafted: NDArray[np.int32] = np.zeros(slots, np.int32)
        self.drafted_behind: NDArray[np.int64] = np.full(slots, -1)
        self.nodes: NDArray[np.int32] = np.zeros((slots, length + 1), np.int32)
        self.parents: NDArray[np.int32] = np.zeros((slots, length + 1), np.int32)
        self.slots: dict[str, int] = {}
        self._tokenizer = tokenizer  # see `output_of`
        self._prompts: NDArray[np.int64] = np.zeros(slots, np.int64)
        self._parameters: list[Any] = [None] * slots
        self._outputs: dict[str, NDArray[np.int32]] = {}  # of preempted requests

    def add(self, request_id: str, slot: int, tokens: list[int], prompt: int, parameters: Any) -> NDArray[np.int32]:
        """A request has got a slot, with `tokens` known of it: its prompt, and what it wrote before a preemption.
        prompt: length of its prompt; parameters: vLLM's SamplingParams, which say where its output ends. Returns int32
        [n], a view of these tokens."""
        self._outputs.pop(request_id, None)
        self.slots[request_id] = slot
        self.tokens[slot, : len(tokens)] = tokens
        self.lengths[slot], self.drafted[slot] = len(tokens), 0
        self._prompts[slot], self._parameters[slot] = prompt, parameters
        self.most[slot] = min(self.tokens.shape[1], prompt + longest_answer(parameters))
        return self.tokens[slot, : len(tokens)]

    def append(
        self, slots: NDArray[np.int32], gained: NDArray[np.int32], lengths: NDArray[np.int32], newest: NDArray[np.int32]
    ) -> NDArray[np.intp]:
        """Requests have gained tokens. slots, gained, lengths: int32 [B], how many tokens each gained and has now;
        newest: int32 [B, K + 1], the newest of these. Returns intp [R], the rows of those that gained some; not those
        of whom others are missing."""
        rows = np.flatnonzero((gained > 0) & (self.lengths[slots] == lengths - gained))
        at = np.arange(newest.shape[1]) - newest.shape[1]
        new = at >= -gained[rows, None]
        of, column = np.nonzero(new)
        self.tokens[slots[rows][of], lengths[rows][of] + at[column]] = newest[rows][new]
        self.lengths[slots[rows]] = lengths[rows]
        return rows

    def room(
        self, slots: NDArray[np.int32], contexts: NDArray[np.int32], most: int, branching: NDArray[np.bool_] | None
    ) -> NDArray[np.int32]:
        """int32 [R], the draft tokens that each of R requests may have: its last token comes after all drafts, and a
        tree, whose tokens are not one behind the other, may be as wide as ever before that. slots, contexts: int32 [R],
        where they stand, and their tokens; most: for each of them; branching: bool [R], which may have trees, None for
        none."""
        room = np.minimum(most, self.most[slots] - 1 - contexts).clip(0)
        if branching is not None:
            wide = branching & (room > 0)
            room[wide] = np.minimum(most, self.tokens.shape[1] - 1 - contexts[wide])
        return room.astype(np.int32)

    def preempt(self, request_id: str) -> None:
        """A request has lost its slot; it gets another one, or finishes."""
        if (slot := self.slots.get(request_id, NO_SLOT)) != NO_SLOT:
            self._outputs[request_id] = self._free(slot)
            self.slots[request_id] = NO_SLOT

    def finish(self, request_id: str) -> NDArray[np.int32] | None:
        """Forget a request; int32 [n], what it wrote, without what steps accepted beyond its end, None if unknown."""
        slot = self.slots.pop(request_id, NO_SLOT)
        return self._outputs.pop(request_id, None) if slot == NO_SLOT else self._free(slot)

    def _free(self, slot: int) -> NDArray[np.int32]:
        """Free a slot; int32 [n], what its request wrote."""
        output = self.tokens[slot, self._prompts[slot] : self.lengths[slot]].tolist()
        self.lengths[slot] = -1
        return output_of(self._parameters[slot], output, self._tokenizer)
