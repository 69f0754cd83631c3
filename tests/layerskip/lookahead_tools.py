"""A draft loop over made-up draft models, as an engine's runner would drive a policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from layerskip_plugin.lookahead import Lookahead

Feature = Callable[[int, NDArray[np.int32]], NDArray[np.float32]]


def draft_round(policy: Lookahead, ids: Sequence[str], most: int, confidence: Feature) -> NDArray[np.int32]:
    """How many tokens the policy drafts for each request; `confidence(position, rows)` gives float32[R]."""
    policy.begin(ids, most)
    drafted = np.zeros(len(ids), np.int32)
    rows = np.arange(len(ids), dtype=np.int32)
    for position in range(most):
        drafted[rows] += 1
        top = np.zeros((len(rows), policy.needs_top), np.float32)
        if policy.needs_top:
            top[:, 0] = confidence(position, rows)
        entropy = np.zeros(len(rows), np.float32) if policy.needs_entropy else None
        more = policy.go_on(position, rows, top, entropy)
        assert more.dtype == np.bool_ and more.shape == rows.shape
        rows = rows[more]
        if not len(rows):
            break
    assert not len(rows), "a policy must stop at the longest draft allowed"
    return drafted
