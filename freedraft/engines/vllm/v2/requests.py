"""`Requests`: the tokens of vLLM's running requests on the host, by the slot that model runner V2 gave them."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freedraft.engines.session import room
from freedraft.engines.vllm.outputs import longest_answer, output_of


class Left(NamedTuple):
    """A request that has given its slot back. output: the tokens that it wrote; parameters: vLLM's SamplingParams."""

    slot: int
    generation: int
    length: int
    output: list[int]
    parameters: Any


class Requests:
    """Tokens by slot, and slots by id. What a step gains belongs to the generations of the slots that it was launched
    with, whatever happens to the slots meanwhile.

    Args:
        slots: number of slots; max_model_len: most tokens of a request; length: K, most draft tokens of one.

    Attributes:
        tokens: int32 [slots, max_model_len].
        lengths: int64 [slots], tokens known of each request; -1 where the slot is free.
        generations: int64 [slots], how many requests have left each slot.
        limits: int64 [slots], the tokens that each request may have at its end.
        drafted: int32 [slots], draft tokens of ours that each request's next step verifies.
        drafted_behind: int64 [slots], the number of the step behind which these were drafted, -1 for none.
        nodes: int32 [slots, K + 1], the root that these follow, and they themselves.
        parents: int32 [slots, K + 1], as in `DraftBatch`.
        slots: the slot of each request that has one, by id.
        ended: requests that have ended, of which a step may still bring tokens, by id.
    """

    def __init__(self, slots: int, max_model_len: int, length: int, tokenizer: Any = None) -> None:
        self.tokens: NDArray[np.int32] = np.empty((slots, max_model_len), np.int32)  # pages are taken as they fill
        self.lengths, self.drafted_behind = np.full((2, slots), -1, np.int64)
        self.generations, self.limits, self._prompts = np.zeros((3, slots), np.int64)
        self.drafted: NDArray[np.int32] = np.zeros(slots, np.int32)
        self.nodes, self.parents = np.zeros((2, slots, length + 1), np.int32)
        self.slots: dict[str, int] = {}
        self._tokenizer = tokenizer  # see `output_of`
        self._parameters: list[Any] = [None] * slots
        self._preempted: dict[str, Left] = {}
        self.ended: dict[str, Left] = {}

    def __len__(self) -> int:
        return len(self.slots) + len(self._preempted) + len(self.ended)

    def add(self, request_id: str, slot: int, tokens: list[int], prompt: int, parameters: Any) -> NDArray[np.int32]:
        """A request has got a slot, with `tokens` known of it: its prompt, and what it wrote before a preemption.
        prompt: length of its prompt; parameters: vLLM's SamplingParams, which say where its output ends. Returns int32
        [n], a view of these tokens."""
        self._preempted.pop(request_id, None)
        self.slots[request_id] = slot
        self.tokens[slot, : len(tokens)] = tokens
        self.lengths[slot], self.drafted[slot], self.drafted_behind[slot] = len(tokens), 0, -1
        self._prompts[slot], self._parameters[slot] = prompt, parameters
        self.limits[slot] = min(self.tokens.shape[1], prompt + longest_answer(parameters))
        return self.tokens[slot, : len(tokens)]

    def append(
        self, slots: NDArray[np.int32], generations: NDArray[np.int64], gained: NDArray[np.int32]
    ) -> NDArray[np.intp]:
        """A step is over. Returns intp [R], the rows of the requests that gained some and are still there; not those of
        whom others are missing.

        Args:
            slots, generations: of B requests, as they were when the step was launched.
            gained: int32 [B, K + 3], how many tokens each gained, how many it has, and the newest of these.
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
        """int32 [R], the draft tokens that each of R requests may have, at most `most`. contexts: int32 [R], tokens of
        each; branching: bool [R], which may have trees, None for none."""
        if branching is None:
            return room(self.limits[slots], contexts, most)
        return room(self.limits[slots], contexts, most, trees=branching, widest=self.tokens.shape[1] - 1 - contexts)

    def preempt(self, request_id: str) -> None:
        """A request has lost its slot; it gets another one, or finishes."""
        if (left := self._leave(request_id)) is not None:
            self._preempted[request_id] = left

    def finish(self, request_id: str) -> None:
        """A request has ended; see `take_ended`."""
        if (left := self._preempted.pop(request_id, None) or self._leave(request_id)) is not None:
            self.ended[request_id] = left

    def take_ended(self, request_id: str) -> NDArray[np.int32]:
        """int32 [n], what a request that has ended wrote, without what steps accepted beyond its end."""
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
