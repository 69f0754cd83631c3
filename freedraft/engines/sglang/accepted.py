"""`AcceptedTokens`: asynchronous host copies of the tokens that each step accepts."""

from __future__ import annotations

from collections import deque
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray


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

    def __init__(self, rows: int, max_nodes: int, device: Any) -> None:
        self._device = torch.device(device)
        self.arrived = np.zeros((rows, 2 + max_nodes), np.int32)  # lengths, seq_lens and tokens, on the host
        self.lock = Lock()
        self._copies = deque[tuple[NDArray[np.int64], torch.Tensor, Any]]()  # rows, host copy, event; oldest first
        self._unused: list[torch.Tensor] = []  # pinned buffers

    def put(self, rows: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Store the tokens accepted for B requests and start the copy. rows: int64 [B], on the host; tokens: int32
        [B, N]; lengths: int32 [B], number of valid tokens; seq_lens: int [B]."""
        with self.lock:
            self.take(wait=False)
        host, done = torch.cat((lengths[:, None], seq_lens[:, None].to(torch.int32), tokens), 1), None
        if self._device.type != "cpu":
            step, host = host, self._unused.pop() if self._unused else torch.from_numpy(self.arrived).pin_memory()
            host[: len(step)].copy_(step, non_blocking=True)
            done = torch.Event(self._device)
            done.record()
        self._copies.append((rows.numpy().copy(), host, done))

    def take(self, *, wait: bool) -> None:
        """Move finished copies to `arrived`, all of them with `wait`. Called with `lock`."""
        while self._copies:
            rows, host, done = self._copies[0]
            if done is not None:
                if not (wait or done.query()):
                    break
                done.synchronize()
            self.arrived[rows] = host.numpy()[: len(rows)]
            self._copies.popleft()
            if done is not None:
                self._unused.append(host)


class Newest:
    """Accepted tokens of the requests in pool rows `rows` [B] up to the present step, readable from any thread. The
    first `read` waits for them; it must come before the next `put`."""

    def __init__(self, accepted: AcceptedTokens, rows: NDArray[np.int64]) -> None:
        self._accepted, self._rows = accepted, rows
        self._found: NDArray[np.int32] | None = None

    def read(self) -> Gained:
        with self._accepted.lock:
            if self._found is None:
                self._accepted.take(wait=True)
                self._found = self._accepted.arrived[self._rows]
        found = self._found
        starts = np.arange(len(found)) * found.shape[1] + 2
        return Gained(found.ravel(), starts, starts + found[:, 0], found[:, 1].astype(np.int64))
