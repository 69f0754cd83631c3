"""`AcceptedTokens`: asynchronous host copies of the tokens that each step accepts."""

from __future__ import annotations

from collections import deque
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

    def __init__(self, rows: int, max_nodes: int) -> None:
        self._arrived = np.zeros((rows, 2 + max_nodes), np.int32)
        self._copies = deque[tuple[NDArray[np.int64], torch.Tensor, Any]]()  # rows, host copy, event; oldest first

    def put(self, rows: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Store the tokens accepted for B requests and start the copy. rows: int64 [B], on the host; tokens: int32
        [B, N]; lengths: int32 [B], number of valid tokens; seq_lens: int [B]."""
        self._take(wait=False)
        step = host = torch.cat((lengths[:, None], seq_lens[:, None].to(torch.int32), tokens), 1)
        done = None
        if step.device.type != "cpu":  # torch keeps pinned memory, and gives the same again for the same size
            host = torch.empty(self._arrived.shape, dtype=torch.int32, pin_memory=True)[: len(step)]
            host.copy_(step, non_blocking=True)
            done = torch.Event(step.device)
            done.record()
        self._copies.append((rows.numpy().copy(), host, done))

    def read(self, rows: NDArray[np.int64]) -> Gained:
        """Wait for the copies and return the tokens of the requests in pool rows `rows` [B]."""
        self._take(wait=True)
        found = self._arrived[rows]
        starts = np.arange(len(rows)) * found.shape[1] + 2
        return Gained(found.ravel(), starts, starts + found[:, 0], found[:, 1].astype(np.int64))

    def _take(self, *, wait: bool) -> None:
        while self._copies and (wait or (done := self._copies[0][2]) is None or done.query()):
            rows, host, done = self._copies.popleft()
            if done is not None:
                done.synchronize()
            self._arrived[rows] = host.numpy()
