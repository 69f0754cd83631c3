"""`DraftSession`: the requests that a method drafts for. `room`: maximum of draft tokens per request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from freedraft.guarded_method import GuardedMethod
from freedraft.method import MethodSpec
from freedraft.step import EngineContext


class DraftSession:
    """The requests that one method drafts for, by id.

    Args:
        spec, options, context: see `MethodSpec.make`; its errors are raised.

    Attributes:
        in_prompt: ids of requests in prefill, if the method needs prompt states.
    """

    def __init__(self, spec: MethodSpec, options: Any, context: EngineContext) -> None:
        self.guarded = GuardedMethod(spec, options, context)
        self.in_prompt: set[str] = set()

    def add(
        self, request_id: str, tokens: NDArray[np.int32], tenant: str | None, extra: Mapping[str, Any] | None
    ) -> None:
        """Add a request at its first step, or again after a preemption; see `Method.begin`."""
        self.guarded.begin(request_id, tokens, tenant, extra)
        if self.guarded.needs_prompt_states:
            self.in_prompt.add(request_id)

    def finish(self, request_id: str, output: NDArray[np.int32] | None, aborted: bool = False) -> None:
        """Remove a request; see `Method.finish`."""
        self.in_prompt.discard(request_id)
        self.guarded.finish(request_id, output, aborted)

    def set_prompt_states(self, request_ids: Iterable[str], states: torch.Tensor) -> None:
        """float [n, H], the last hidden states of the prompts of n requests that have just finished prefill."""
        for request_id, state in zip(request_ids, states.float().cpu().numpy(), strict=True):
            self.in_prompt.discard(request_id)
            self.guarded.set_prompt_state(request_id, state)


def room(
    limits: NDArray[np.int64], contexts: NDArray[Any], most: int, *,
    trees: NDArray[np.bool_] | bool = False, widest: NDArray[Any] | int | None = None,
) -> NDArray[np.int32]:  # fmt: skip
    """int32 [B], maximum of draft tokens per request: one token must remain for the one after the draft. A tree, whose
    tokens are not consecutive, may be of full size until then.

    Args:
        limits: int [B], maximum total tokens of each request; contexts: int [B], its present tokens.
        most: maximum of draft tokens per request.
        trees: bool [B], which requests may have trees; widest: the most tokens of each tree, None for `most`.
    """
    chains: NDArray[np.int64] = np.maximum(np.minimum(most, limits - 1 - contexts), 0)
    if trees is not False:
        widths = most if widest is None else np.minimum(most, widest)
        chains = np.where((chains > 0) & trees, widths, chains)
    return chains.astype(np.int32)
