"""Rows of SGLang's `req_to_token` for windowed drafts: what stands in them, by a list."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from freedraft.draft_pass import Window

REQUESTS, LENGTH = 5, 300


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("attended", [None, 150])
def test_rows_hold_the_slots_that_a_window_leaves(page_size, attended):
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    from freedraft.engines.sglang.draft_model import WindowRows

    pool = ReqToTokenPool(REQUESTS, LENGTH, "cpu", False)
    pool.req_to_token[1:] = torch.randperm(REQUESTS * LENGTH).view(REQUESTS, LENGTH)
    before, window, drafts = pool.req_to_token.clone(), Window(20, 50), 6
    extra = WindowRows(pool, page_size)
    assert set(pool.free_slots).isdisjoint(extra.rows.tolist()) and len(extra.rows) == REQUESTS
    requests, roots = torch.tensor([3, 1, 5]), np.array([290, 45, 140])
    left_out = extra.write(requests, roots, window, drafts, attended)
    assert torch.equal(pool.req_to_token[: REQUESTS + 1], before), "rows of requests stay as they are"
    for row, request, root, out in zip(extra.rows, requests.tolist(), roots.tolist(), left_out.tolist(), strict=False):
        sinks = 0 if attended is not None and root + drafts > attended else window.sinks
        sink_end = -(-sinks // page_size) * page_size
        start = max(sink_end, (root + 1 - window.newest) // page_size * page_size)
        places = (
            [*range(min(sink_end, root + drafts)), *range(start, root + drafts)]
            if start > sink_end
            else [*range(root + drafts)]
        )
        assert len(places) == root + drafts - out
        assert pool.req_to_token[row, : len(places)].tolist() == before[request, places].tolist()
