"""`AcceptedTokens`: asynchronous host copies of the tokens that each step accepts."""

from __future__ import annotations

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


class OneCopy(NamedTuple):
    """Host copy of `AcceptedTokens` after one step, readable from any thread. done: event to wait for, or None."""

    host: torch.Tensor
    done: Any

    def read(self, rows: NDArray[np.int64]) -> Gained:
        """Wait for the copy and return the tokens of the requests in pool rows `rows` [B]."""
        if self.done is not None:
            self.done.synchronize()
        found = self.host.numpy()[rows]
        starts = np.arange(len(rows)) * found.shape[1] + 2
        return Gained(found.ravel(), starts, starts + found[:, 0], found[:, 1].astype(np.int64))


class AcceptedTokens:
    """Newest accepted tokens of all requests, by row of SGLang's request pool. One asynchronous copy per step takes
    them to the host, queued right after verification. max_nodes: N, maximum number of tokens accepted per request and
    step."""

    def __init__(self, rows: int, max_nodes: int, device: Any) -> None:
        self._held = torch.zeros(rows, 2 + max_nodes, dtype=torch.int32, device=device)
        self.newest = OneCopy(self._held.cpu(), None)

    def put(self, rows: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Store the tokens accepted for B requests and start the copy. rows: int64 [B]; tokens: int32 [B, N]; lengths:
        int32 [B], number of valid tokens; seq_lens: int [B]."""
        self._held[rows] = torch.cat((lengths[:, None], seq_lens[:, None].to(torch.int32), tokens), 1)
        if self._held.device.type == "cpu":
            self.newest = OneCopy(self._held.clone(), None)
            return
        host = torch.empty(self._held.shape, dtype=torch.int32, pin_memory=True)
        host.copy_(self._held, non_blocking=True)
        done = torch.Event(self._held.device)
        done.record()
        self.newest = OneCopy(host, done)
