"""`WindowRows`: rows of SGLang's `req_to_token` with the part of a request's KV that windowed draft passes read."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from freedraft.draft_pass import Window
from freedraft.engines.on_device import on_device

MAX_ROWS = 256


class WindowRows:
    """Rows behind those of the pool, which it never gives to a request.

    Attention backends keep the tensor, some of them in CUDA graphs, so it has to be there before they are made.

    Args:
        pool: SGLang's ReqToTokenPool; page_size: tokens of a page of its KV cache.

    Attributes:
        rows: int64 [R], indices in `req_to_token`.
    """

    def __init__(self, pool: Any, page_size: int) -> None:
        self._pool, self._page_size = pool, page_size
        known = self._pool.req_to_token
        more = known.new_zeros(min(self._pool.size, MAX_ROWS), known.shape[1])
        self.rows = torch.arange(len(known), len(known) + len(more), device=known.device)
        self._pool.req_to_token = torch.cat((known, more))

    def write(
        self,
        requests: torch.Tensor,
        roots: NDArray[np.int64],
        window: Window,
        max_draft_len: int,
        attended: int | None,
    ) -> NDArray[np.int64]:
        """Make rows, from the first on, of what a window leaves of requests.

        Args:
            requests: int64 [B], rows of the requests, B <= R.
            roots: int64 [B], positions of their roots; max_draft_len: positions that are drafted from there on.

        Returns:
            int64 [B], tokens of each that are left out.
        """
        size, table = self._page_size, self._pool.req_to_token
        sinks, dropped = window.pages(roots, size, attended=attended, max_draft_len=max_draft_len)
        sinks, dropped = sinks * size, dropped * size
        places = np.arange((roots + max_draft_len - dropped).max())
        places = np.where(places < sinks[:, None], places, places + dropped[:, None])
        there = on_device(np.minimum(places, table.shape[1] - 1), table.device)
        table[self.rows[: len(requests)], : places.shape[1]] = table[requests[:, None], there]
        return dropped
