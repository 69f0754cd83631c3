"""`DraftModel`: the target model as a drafter of itself, with some sublayers skipped and part of the KV cache read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freedraft.recipe import Recipe
from freedraft.step import Step


class PassOutputs(NamedTuple):
    """What a draft pass returns of each distribution."""

    top: int = 1  # K, how many of the most likely tokens, with their probabilities
    entropy: bool = False


class Drafted(NamedTuple):
    """The most likely next tokens of each of R requests by N draft passes, on the host."""

    tokens: NDArray[np.int32]  # [N, R, K], best first; beyond the vocabulary's size undefined
    probabilities: NDArray[np.float32]  # [N, R, K], theirs; beyond the vocabulary's size 0
    entropy: NDArray[np.float32] | None  # [N, R], of the whole distribution in nats, if requested


class DraftModel(ABC):
    """The target model, run with some sublayers skipped, over the engine's own weights and paged KV cache."""

    n_layers: int  # of the target
    waits: bool  # whether reading a pass stalls the device, so that several are read at once
    trees: bool = False  # whether drafts may be trees

    @abstractmethod
    def build(self, recipe: Recipe, outputs: PassOutputs, *, optimize: bool) -> Any:
        """A draft pass through the sublayers that `recipe` keeps, over its window. optimize: whether to compile it, or
        capture CUDA graphs, where the engine does so."""

    def capacities(self, step: Step) -> NDArray[np.int32]:
        """int32 [B]: draft tokens allowed per request by its reserved KV slots; at most `step.capacities`, the default
        (SGLang reserves slots for the widest tree)."""
        return step.capacities

    @abstractmethod
    def start(self, step: Step, draft_pass: Any, rows: NDArray[np.intp], max_draft_len: int) -> Any:
        """Start a `freedraft.engines.draft_round.RankedRound` of at most `max_draft_len` positions for the requests at
        `rows` of the step (intp [R]), with a draft pass from `build`."""

    @abstractmethod
    def scorer(self, window: int) -> Any:
        """`freedraft.engines.matchness.SetScores` of recipes on the newest `window` generated tokens of a request, for
        searches while serving."""
