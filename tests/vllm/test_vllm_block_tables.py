"""Block tables of windows: never wider than the engine's, whatever else is in the batch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from freedraft.draft_model import Window
from freedraft.engines.vllm.draft_passes import PagedDraftRound

SIZE, LONGEST = 16, 5


@pytest.mark.parametrize("window", [Window(16, 48), Window(16, 8176)])
def test_a_table_that_is_full_stays_as_wide(window: Window) -> None:
    """One request nearly at the end of its context, beside one that may still draft five tokens."""
    pages = 256
    whole = torch.arange(2 * pages, dtype=torch.int32).view(2, pages)
    model = SimpleNamespace(attended=None, tensor=torch.from_numpy)
    round_ = SimpleNamespace(pages=SimpleNamespace(block_size=SIZE), max_draft_len=LONGEST, model=model)
    first = np.array([pages * SIZE - 3, 100], np.int64)
    tables, dropped = PagedDraftRound._cut(round_, whole, first, window)
    assert tables.shape[1] <= pages
    for row, (position, left_out) in enumerate(zip(first.tolist(), dropped.tolist(), strict=True)):
        newest = min((position + LONGEST - 1) // SIZE, pages - 1)
        assert tables[row, newest - left_out // SIZE] == whole[row, newest], "where the newest token's KV goes"
