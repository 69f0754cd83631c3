"""Teaching `Acceptance` without an engine."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from freedraft.cost.acceptance import Acceptance
from freedraft.draft import DraftBatch


def observe(acceptance: Acceptance, draft: DraftBatch, continuations: Sequence[Sequence[int]]) -> int:
    """Learn from the tokens that followed each root of a draft. Returns the number of nodes with a known outcome."""
    ends = np.cumsum([len(tokens) for tokens in continuations], dtype=np.int64)
    tokens = np.array([token for each in continuations for token in each], np.int32)
    starts = np.array([0, *ends[:-1]], np.int64)
    return acceptance.learn(draft, draft.counts, np.arange(len(ends), dtype=np.int32), tokens, starts, ends)
