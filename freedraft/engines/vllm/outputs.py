"""Where a request's output ends."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def output_of(parameters: Any, tokens: Sequence[int]) -> NDArray[np.int32]:
    """What a request wrote, without what its last step accepted beyond its end, which the scheduler drops later.

    Args:
        parameters: its SamplingParams, None for none.
    """
    tokens = tokens[: getattr(parameters, "max_tokens", None)]
    stops: frozenset[int] = getattr(parameters, "all_stop_token_ids", None) or frozenset()
    if not getattr(parameters, "ignore_eos", False) and not stops.isdisjoint(tokens):
        tokens = tokens[: next(i for i, token in enumerate(tokens) if token in stops) + 1]
    return np.array(tokens, np.int32)
