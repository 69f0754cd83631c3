"""`AcceptedTokens`: asynchronous host copies of the tokens that each step accepts."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from freedraft.engines.copied import Copied, to_host


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
        self._copies = deque[tuple[NDArray[np.int64], Copied]]()  # with their rows, oldest first

    def put(self, rows: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Store the tokens accepted for B requests and start the copy. rows: int64 [B], on the host; tokens: int32
        [B, N]; lengths: int32 [B], number of valid tokens; seq_lens: int [B]."""
        self._take(wait=False)
        step = torch.cat((lengths[:, None], seq_lens[:, None].to(torch.int32), tokens), 1)
        self._copies.append((rows.numpy().copy(), to_host(step)))

    def read(self, rows: NDArray[np.int64]) -> Gained:
        """Wait for the copies and return the tokens of the requests in pool rows `rows` [B]."""
        self._take(wait=True)
        found = self._arrived[rows]
        starts = np.arange(len(rows)) * found.shape[1] + 2
        return Gained(found.ravel(), starts, starts + found[:, 0], found[:, 1].astype(np.int64))

    def _take(self, *, wait: bool) -> None:
        while self._copies and (wait or self._copies[0][1].arrived()):
            rows, copied = self._copies.popleft()
            self._arrived[rows] = copied.wait()
