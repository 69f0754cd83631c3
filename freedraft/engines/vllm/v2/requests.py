"""`Requests`: the tokens of vLLM's running requests on the host, by the slot that model runner V2 gave them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freedraft.engines.vllm.outputs import output_of


@dataclass(slots=True)
class Running:
    """A request that has a slot.

    Attributes:
        slot: of vLLM's RequestState; -1 while it is preempted.
        prompt: length of its prompt; length: tokens known of it.
        parameters: vLLM's SamplingParams, which say where its output ends.
        drafted: draft tokens of ours that its next step verifies.
        output: what it wrote, while it has no slot.
    """

    slot: int
    prompt: int
    length: int
    parameters: Any
    drafted: int = 0
    output: NDArray[np.int32] | None = None


class Requests:
    """Tokens by slot, and requests by id.

    Args:
        slots: number of slots; max_model_len: most tokens of a request.
    """

    def __init__(self, slots: int, max_model_len: int) -> None:
        self.tokens: NDArray[np.int32] = np.empty((slots, max_model_len), np.int32)  # pages are taken as they fill
        self.by_id: dict[str, Running] = {}

    def add(self, request_id: str, slot: int, tokens: list[int], prompt: int, parameters: Any) -> NDArray[np.int32]:
        """A request has got a slot, with `tokens` known of it: its prompt, and what it wrote before a preemption.

        Returns:
            int32 [n], a view of these tokens.
        """
        self.by_id[request_id] = Running(slot, prompt, len(tokens), parameters)
        self.tokens[slot, : len(tokens)] = tokens
        return self.tokens[slot, : len(tokens)]

    def append(self, request_id: str, slot: int, length: int, new: NDArray[np.int32]) -> bool:
        """A request holds `length` tokens now, the newest of which are `new`. False where others are missing."""
        running = self.by_id.get(request_id)
        if running is None or running.slot != slot or running.length != length - len(new):
            return False
        self.tokens[slot, running.length : length] = new
        running.length = length
        return True

    def preempt(self, request_id: str) -> None:
        """A request has lost its slot; it gets another one, or finishes."""
        if (running := self.by_id.get(request_id)) is not None:
            running.output, running.slot = self._output(running), -1

    def finish(self, request_id: str) -> NDArray[np.int32] | None:
        """Forget a request; int32 [n], what it wrote, without what steps accepted beyond its end, None if unknown."""
        running = self.by_id.pop(request_id, None)
        if running is None:
            return None
        return self._output(running) if running.slot >= 0 else running.output

    def _output(self, running: Running) -> NDArray[np.int32]:
        return output_of(running.parameters, self.tokens[running.slot, running.prompt : running.length].tolist())
