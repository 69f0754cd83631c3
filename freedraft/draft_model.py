"""`DraftModel`: the target model as a drafter of itself; `Recipe` and `Window`: what its passes skip, and read."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freedraft.step import Step


class Window(NamedTuple):
    """The part of a request's KV cache that a draft pass reads: its first tokens (attention sinks) and its newest, in
    whole pages, so that kernels read a shorter block table and nothing else changes (StreamingLLM, Xiao et al., 2024).
    """

    sinks: int
    newest: int

    @property
    def tokens(self) -> int:
        return self.sinks + self.newest

    def whole_up_to(self, page_size: int) -> int:
        """Longest request, in tokens with its root, of which the window leaves out no page."""
        return self.newest + (-(-self.sinks // page_size) + 1) * page_size - 1

    def pages(
        self, roots: NDArray[np.int64], page_size: int, *, attended: int | None = None, max_draft_len: int = 1
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """s and d, int64 [B], which say what a round of draft passes leaves out: page i of its table is page i of the
        request for i < s, and page i + d from there on.

        Args:
            roots: int64 [B], position of each request's root. The newest tokens are counted from here.
            attended: the model's own sliding window, tokens; a request that may draft beyond it has no sinks: the
                engine may have reused their pages.
        """
        sinks = np.full(len(roots), -(-self.sinks // page_size))
        if attended is not None:
            sinks[roots + max_draft_len > attended] = 0
        return sinks, np.maximum((roots + 1 - self.newest) // page_size - sinks, 0)


@dataclass(frozen=True, slots=True)
class Recipe:
    """The sublayers of a model that a draft pass skips, and the part of the KV cache that it reads."""

    n_layers: int  # L
    attention: frozenset[int]  # layers whose attention is skipped
    mlp: frozenset[int]  # layers whose MLP is skipped
    model: str = ""  # fingerprint of the set's model; "" if unknown
    window: Window | None = None  # the part of the KV cache that draft passes read, not saved; None for all of it

    @property
    def bits(self) -> tuple[bool, ...]:
        """2L flags, True where skipped, in the order attention 0, MLP 0, attention 1, ..."""
        return tuple(i in kind for i in range(self.n_layers) for kind in (self.attention, self.mlp))


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
