"""`DraftSession`: the requests that a method drafts for. `room`: the number of draft tokens that each may have."""

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
        spec, options, context: see `MethodSpec.make`, whose errors are passed on.

    Attributes:
        in_prompt: requests whose prompt is not over, where the method wants the hidden states behind prompts.
    """

    def __init__(self, spec: MethodSpec, options: Any, context: EngineContext) -> None:
        self.guarded = GuardedMethod(spec, options, context)
        self.in_prompt: set[str] = set()

    def add(
        self, request_id: str, tokens: NDArray[np.int32], tenant: str | None, extra: Mapping[str, Any] | None
    ) -> None:
        """A request gets its first step, or begins anew; see `Method.begin`."""
        self.guarded.begin(request_id, tokens, tenant, extra)
        if self.guarded.needs_prompt_states:
            self.in_prompt.add(request_id)

    def finish(self, request_id: str, output: NDArray[np.int32] | None, aborted: bool = False) -> None:
        """A request has ended; see `Method.finish`."""
        self.in_prompt.discard(request_id)
        self.guarded.finish(request_id, output, aborted)

    def set_prompt_states(self, request_ids: Iterable[str], states: torch.Tensor) -> None:
        """float [n, H], the hidden states behind the prompts of n requests, whose prompts are over now."""
        for request_id, state in zip(request_ids, states.float().cpu().numpy(), strict=True):
            self.in_prompt.discard(request_id)
            self.guarded.set_prompt_state(request_id, state)


def room(
    limits: NDArray[np.int64], contexts: NDArray[Any], most: int, *,
    trees: NDArray[np.bool_] | bool = False, widest: NDArray[Any] | int | None = None,
) -> NDArray[np.int32]:  # fmt: skip
    """int32 [B], the draft tokens that each of B requests may have: its last token comes after all drafts, and a tree,
    whose tokens are not one behind the other, may be as wide as ever before that.

    Args:
        limits: int [B], the tokens that each request may have at its end; contexts: int [B], that it has now.
        most: draft tokens of a request.
        trees: bool [B], which requests may have trees; widest: the most tokens of each tree, None for `most`.
    """
    chains: NDArray[np.int64] = np.maximum(np.minimum(most, limits - 1 - contexts), 0)
    if trees is not False:
        widths = most if widest is None else np.minimum(most, widest)
        chains = np.where((chains > 0) & trees, widths, chains)
    return chains.astype(np.int32)
