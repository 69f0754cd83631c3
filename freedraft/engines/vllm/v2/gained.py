"""`GainedTokens`: a step's accepted tokens on their way from model runner V2 to the host."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from freedraft_kernels.device.newest_tokens import newest_tokens
from numpy.typing import NDArray


class GainedTokens:
    """Accepted tokens of a step. B requests, K = most draft tokens of a request. request_ids: B ids; slots,
    generations: int64 [B], see `Requests`; scheduled: int32 [B], scheduled draft tokens of each; query_tokens: of the
    step; 0 if it did more than decode; taken: whether `Requests` have its tokens."""

    def __init__(self, slots: int, length: int, device: torch.device) -> None:
        from vllm.v1.worker.gpu.buffer_utils import UvaBuffer

        self._device = host = torch.zeros(slots, length + 3, dtype=torch.int32, device="cpu")
        if device.type != "cpu":  # which writes the host's memory
            buffer = UvaBuffer(host.shape, torch.int32)
            self._device, host = buffer.uva(), buffer.cpu
        self._array = host.numpy()
        self._event: Any = None
        self._near: Any = None  # shortly before the tokens: a thread that waits sleeps until it, and not from there on
        if device.type == "cuda":
            self._near, self._event = torch.cuda.Event(blocking=True), torch.cuda.Event(enable_timing=True)
        elif device.type != "cpu":
            self._event = torch.Event(device, enable_timing=True)
        self._ended = 0.0
        self.request_ids: list[str] = []
        self.slots, self.scheduled = np.zeros(0, np.intp), np.zeros(0, np.int32)
        self.generations = np.zeros(0, np.int64)
        self.query_tokens, self.number = 0, -1
        self.taken, self._arrived = True, False

    def approach(self) -> None:
        """The model has been launched; its tokens are drawn next."""
        if self._near is not None:
            self._near.record()

    def copy(
        self, input_batch: Any, num_sampled: torch.Tensor, states: Any, generations: NDArray[np.int64], number: int,
        drafts: torch.Tensor,
    ) -> None:  # fmt: skip
        """Start the copy, queued after the step's own work. num_sampled: int32 [B], new tokens of each request; states:
        vLLM's RequestState; generations: int64 [slots]; drafts: int64 [B, K], filled with each request's newest
        token."""
        batch = input_batch.num_reqs
        self.slots, self.number = input_batch.idx_mapping_np[:batch].copy(), number
        self.generations = generations[self.slots]
        self.request_ids = list(input_batch.req_ids)
        scheduled = input_batch.num_draft_tokens_per_req
        self.scheduled = np.zeros(batch, np.int32) if scheduled is None else scheduled[:batch].astype(np.int32)
        self.query_tokens = 0 if input_batch.has_prefill else int(input_batch.num_tokens)
        packed, slots = self._device[:batch], input_batch.idx_mapping[:batch]
        newest_tokens(states.all_token_ids.gpu, states.total_len.gpu, slots, num_sampled[:batch], packed, drafts)
        if self._event is not None:
            self._event.record()
        else:
            self._ended = time.perf_counter()
        self._arrived = False

    def wait(self) -> NDArray[np.int32]:
        """int32 [B, K + 3]: number of new tokens of each request, number of all, and its newest K + 1."""
        if self._event is not None and not self._arrived:
            if self._near is not None:
                self._near.synchronize()
            self._event.synchronize()
        self._arrived = True
        return self._array[: len(self.slots)]

    def seconds_since(self, other: GainedTokens) -> float:
        """Seconds on the device from the end of another step to the end of this one; both must be finished."""
        if self._event is None or other._event is None:
            return self._ended - other._ended
        return 1e-3 * float(other._event.elapsed_time(self._event))
