"""`DraftModel`: the target model as a drafter of itself, with some sublayers skipped, as an engine offers it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from freedraft.method import Step


class Recipe(Protocol, Hashable):
    """Which sublayers of a model with L layers a draft pass skips."""

    @property
    def n_layers(self) -> int: ...

    @property
    def attention(self) -> frozenset[int]:
        """Layers whose attention is skipped."""

    @property
    def mlp(self) -> frozenset[int]:
        """Layers whose MLP is skipped."""

    @property
    def bits(self) -> tuple[bool, ...]:
        """2L flags, True where skipped, in the order attention 0, MLP 0, attention 1, ..."""


class Drafted(NamedTuple):
    """What one draft pass says of the next token of each of R requests, on the host.

    Attributes:
        tokens: int32 [R, K], the most likely tokens, best first; beyond the vocabulary's size undefined.
        probabilities: float32 [R, K], theirs; beyond the vocabulary's size 0.
        entropy: float32 [R], of the whole distribution in nats; None unless asked for.
    """

    tokens: NDArray[np.int32]
    probabilities: NDArray[np.float32]
    entropy: NDArray[np.float32] | None


class DraftRound(ABC):
    """Draft passes for the requests of one step, one token per request and pass.

    The pass at position p of a request writes the KV of its token at context - 1 + p, in a slot that the engine has
    reserved for this step's verification, which writes it again before anything else reads it.
    """

    @abstractmethod
    def run(self, draft_pass: Any, rows: NDArray[np.intp], tokens: NDArray[np.int32], position: int) -> Drafted:
        """Run one pass.

        Args:
            draft_pass: from `DraftModel.build`.
            rows: intp [R], places in the step, ascending; all smaller positions have been run for them.
            tokens: int32 [R], the token at `position` of each: its root at 0, then what the pass before drafted.
            position: from 0.
        """


class DraftModel(ABC):
    """The target model, run with some sublayers skipped, over the engine's own weights and paged KV cache."""

    n_layers: int

    @abstractmethod
    def build(self, recipe: Recipe, *, top_k: int, entropy: bool, optimize: bool) -> Any:
        """A draft pass through the sublayers that `recipe` keeps.

        Args:
            top_k: how many of the most likely tokens a pass returns, K >= 1.
            entropy: whether it returns the distribution's entropy.
            optimize: whether it is worth compiling, or capturing in CUDA graphs, where the engine does so.
        """

    @abstractmethod
    def capacities(self, step: Step) -> NDArray[np.int32]:
        """int32 [B]: how many tokens may be drafted for each request, by the KV slots that are reserved for it; never
        more than `step.capacities`."""

    @abstractmethod
    def start(self, step: Step, rows: NDArray[np.intp], max_draft_len: int) -> DraftRound:
        """Begin a round of at most `max_draft_len` positions for the requests at `rows` of the step (intp [R])."""

    @abstractmethod
    def scorer(self, window: int) -> MatchnessScorer:
        """Scores recipes on the newest `window` tokens that requests have generated, for searches while serving."""


class MatchnessScorer(ABC):
    """SWIFT's matchness: the share of a window's tokens after which a recipe's most likely token is what came."""

    @abstractmethod
    def observe(self, step: Step) -> bool:
        """Take the newest tokens of a request of this step, of another one each time; False when none has generated
        enough."""

    @abstractmethod
    def __call__(self, recipes: Sequence[Recipe]) -> NDArray[np.float64]:
        """float64 [J]: matchness of each recipe on the tokens that `observe` took; one batched forward pass."""
