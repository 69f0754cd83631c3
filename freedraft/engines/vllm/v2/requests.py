"""`Requests`: the tokens of vLLM's running requests on the host, by slot of model runner V2."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freedraft.engines.vllm.outputs import drafted_up_to, output_of
from freedraft.step import room


class Left(NamedTuple):
    """A request that has left its slot. output: its output tokens; parameters: vLLM's SamplingParams."""

    slot: int
    generation: int
    length: int
    output: list[int]
    parameters: Any


class Requests:
    """Tokens by slot, and slots by id. A step's new tokens belong to the generations of its slots at launch: if a slot
    has been reassigned since, they are dropped.

    Args:
        slots: number of slots; max_model_len: most tokens of a request; length: K, most draft tokens of one.

    Attributes:
        tokens: int32 [slots, max_model_len].
        lengths: int64 [slots], tokens held of each request; -1 for a free slot.
        generations: int64 [slots], number of requests that have left each slot.
        limits: int64 [slots], maximum total tokens of each request.
        drafted: int32 [slots], our draft tokens that each request's next step verifies.
        drafted_behind: int64 [slots], number of the step after which these were drafted, -1 for none.
        nodes: int32 [slots, K + 1], root and draft tokens.
        parents: int32 [slots, K + 1], as in `DraftBatch`.
        slots: the slot of each request that has one, by id.
        ended: finished requests, by id, for which a step may still return tokens.
    """

    def __init__(self, slots: int, max_model_len: int, length: int, tokenizer: Any = None) -> None:
        self.tokens: NDArray[np.int32] = np.empty((slots, max_model_len), np.int32)  # memory is used as it fills
        self.lengths, self.drafted_behind = np.full((2, slots), -1, np.int64)
        self.generations, self.limits, self._prompts = np.zeros((3, slots), np.int64)
        self.drafted: NDArray[np.int32] = np.zeros(slots, np.int32)
        self.nodes, self.parents = np.zeros((2, slots, length + 1), np.int32)
        self.slots: dict[str, int] = {}
        self._tokenizer = tokenizer  # see `output_of`
        self._parameters: list[Any] = [None] * slots
        self._preempted: dict[str, Left] = {}
        self.ended: dict[str, Left] = {}

    def add(self, request_id: str, slot: int, tokens: list[int], prompt: int, parameters: Any) -> NDArray[np.int32]:
        """Add a request with its tokens so far: its prompt, and output before a preemption. prompt: length of the
        prompt; parameters: vLLM's SamplingParams, which limit its output. Returns int32 [n], a view of the tokens."""
        self._preempted.pop(request_id, None)
        self.slots[request_id] = slot
        self.tokens[slot, : len(tokens)] = tokens
        self.lengths[slot], self.drafted[slot], self.drafted_behind[slot] = len(tokens), 0, -1
        self._prompts[slot], self._parameters[slot] = prompt, parameters
        self.limits[slot] = min(self.tokens.shape[1], drafted_up_to(parameters, prompt))
        return self.tokens[slot, : len(tokens)]

    def append(
        self, slots: NDArray[np.int32], generations: NDArray[np.int64], gained: NDArray[np.int32]
    ) -> NDArray[np.intp]:
        """Append a step's new tokens. Returns intp [R], rows of requests with new tokens that are still in their slot
        and miss no earlier ones.

        Args:
            slots, generations: of B requests, at the launch of the step.
            gained: int32 [B, K + 3], see `GainedTokens.wait`.
        """
        counts, lengths, newest = gained[:, 0], gained[:, 1], gained[:, 2:]
        known = (counts > 0) & (self.lengths[slots] == lengths - counts) & (self.generations[slots] == generations)
        rows = np.flatnonzero(known)
        at = np.arange(newest.shape[1]) - newest.shape[1]
        new = at >= -counts[rows, None]
        of, column = np.nonzero(new)
        self.tokens[slots[rows][of], lengths[rows][of] + at[column]] = newest[rows][new]
        self.lengths[slots[rows]] = lengths[rows]
        for left in self.ended.values():
            for row in np.flatnonzero((slots == left.slot) & (generations == left.generation)).tolist():
                if left.length == lengths[row] - counts[row]:
                    left.output.extend(newest[row, newest.shape[1] - counts[row] :].tolist())
        return rows

    def room(
        self, slots: NDArray[np.int32], contexts: NDArray[np.int32], most: int, branching: NDArray[np.bool_] | None
    ) -> NDArray[np.int32]:
        """int32 [R], maximum of draft tokens per request, at most `most`. contexts: int32 [R], tokens of each;
        branching: bool [R], which may have trees; None: none."""
        return room(self.limits[slots], contexts, most, trees=branching, widest=self.tokens.shape[1] - 1 - contexts)

    def preempt(self, request_id: str) -> None:
        """Release the slot of a preempted request."""
        if (left := self._leave(request_id)) is not None:
            self._preempted[request_id] = left

    def finish(self, request_id: str) -> None:
        """Release the slot of a finished request; see `take_ended`."""
        if (left := self._preempted.pop(request_id, None) or self._leave(request_id)) is not None:
            self.ended[request_id] = left

    def take_ended(self, request_id: str) -> NDArray[np.int32]:
        """Remove a finished request; int32 [n], its output without tokens that steps accepted beyond its end."""
        left = self.ended.pop(request_id)
        return output_of(left.parameters, left.output, self._tokenizer)

    def _leave(self, request_id: str) -> Left | None:
        if (slot := self.slots.pop(request_id, None)) is None:
            return None
        length, generation = int(self.lengths[slot]), int(self.generations[slot])
        output = self.tokens[slot, self._prompts[slot] : length].tolist()
        self.lengths[slot] = -1
        self.generations[slot] += 1
        return Left(slot, generation, length, output, self._parameters[slot])
