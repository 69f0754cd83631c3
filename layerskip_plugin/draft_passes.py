"""`Passes`: the draft passes of a round over some requests of a step, and `Round`: what they drafted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from freedraft.draft_model import Drafted, DraftRound
from freedraft.method import Step


class Round:
    """What one round drafted.

    Attributes:
        tokens: int32 [B, D, K], the draft's best tokens at each position, best first.
        probabilities: float32 [B, D, K]; entropy: float32 [B, D].
        drafted: int32 [B], positions drafted.
    """

    def __init__(self, request_ids: Sequence[str], batch: int, depth: int, top_k: int) -> None:
        self.request_ids = request_ids
        self.tokens = np.zeros((batch, depth, top_k), np.int32)
        self.probabilities = np.zeros((batch, depth, top_k), np.float32)
        self.entropy = np.zeros((batch, depth), np.float32)
        self.drafted = np.zeros(batch, np.int32)

    def outcome(self, step: Step) -> Outcome | None:
        """What the step that verified it accepted; None where none of its requests had drafts and is still there."""
        row_of = {request_id: row for row, request_id in enumerate(step.request_ids)}
        some = np.flatnonzero(self.drafted > 0).tolist()
        pairs = [(i, row_of[r]) for i in some if (r := self.request_ids[i]) in row_of]
        if not pairs:
            return None
        before, now = np.array(pairs, np.intp).T
        # The chain comes first in a tree, so that what the engine or a controller cut off is its end.
        verified = np.minimum(self.drafted[before], step.drafted[now])
        chain = self.tokens[before, :, 0]
        positions = np.arange(chain.shape[1])
        place = step.starts[now][:, None] + positions
        # The last token gained is the bonus, which no draft token stands for.
        inside = (place < step.ends[now][:, None] - 1) & (positions < verified[:, None])
        same = inside & (step.tokens[np.minimum(place, len(step.tokens) - 1)] == chain)
        accepted = np.cumprod(same, 1).sum(1).astype(np.int32)
        return Outcome([self.request_ids[i] for i in before.tolist()], verified, accepted, step.accepted[now])


class Outcome(NamedTuple):
    """What became of a round's chains: as far as the tokens that each of R requests gained agree with its chain. A
    sibling that was accepted ends the chain before it.

    Attributes:
        verified, accepted: int32 [R], draft tokens of its chain; of_step: int32 [R], all that the step accepted.
    """

    request_ids: list[str]
    verified: NDArray[np.int32]
    accepted: NDArray[np.int32]
    of_step: NDArray[np.int32]


Part: TypeAlias = "tuple[int, NDArray[np.intp], NDArray[np.int32], int | NDArray[np.int64]]"
"""What passes of one recipe are run on: its place, and what `DraftRound.launch` takes: rows, tokens, position."""


class Passes:
    """The draft passes of a round, each recipe's in turn.

    Args:
        draft_round: of the engine's draft model; draft_passes: of each recipe.
        places: intp [B], of each request's recipe.
        result: what is filled.
        expected: seconds that a pass takes by (a recipe's place, its tokens), 0 where it never ran: those of several
            recipes are read back at once, so that only their sum is known, and each gets its share of it. None where
            each is read back by itself.
        record: told of (a recipe's place, tokens of a pass, its seconds, how many there were), with what a round takes
            besides: setting up, deciding. since: when the round began, by `time.perf_counter`.

    Attributes:
        read: intp [B], positions of each request whose tokens are known.
    """

    def __init__(
        self,
        draft_round: DraftRound,
        draft_passes: Sequence[Any],
        places: NDArray[np.intp],
        result: Round,
        expected: Callable[[int, int], float] | None,
        record: Callable[[int, int, float, int], None],
        since: float,
    ) -> None:
        self._draft_round, self._draft_passes, self._places = draft_round, draft_passes, places
        self._result, self._expected, self._record, self._since = result, expected, record, since
        self.read = np.zeros(len(result.drafted), np.intp)

    def run(self, rows: NDArray[np.intp], tokens: NDArray[np.int32], position: int, count: int) -> None:
        """So many passes from `position` on; tokens: int32 [B], the newest of each request."""
        self._run([(n, rows[part], tokens[rows[part]], position) for n, part in self._by_recipe(rows)], count)
        self.read[rows] = position + count

    def _by_recipe(self, rows: NDArray[np.intp]) -> Iterator[tuple[int, NDArray[np.intp]]]:
        places = self._places[rows]
        for number in np.unique(places).tolist():
            yield number, np.flatnonzero(places == number)

    def _run(self, parts: Sequence[Part], count: int) -> None:
        expected = [self._expected(number, len(rows)) for number, rows, _, _ in parts] if self._expected else [0.0]
        at_once = all(expected)
        for together in [parts] if at_once else [[part] for part in parts]:
            launched = [
                self._draft_round.launch(self._draft_passes[number], rows, tokens, position, count)
                for number, rows, tokens, position in together
            ]
            for (_, rows, _, position), drafted in zip(together, self._draft_round.read(launched), strict=True):
                self._take(drafted, rows, position)
            now = time.perf_counter()
            each = expected if at_once else [1.0]
            for (number, rows, _, _), seconds in zip(together, each, strict=True):
                self._record(number, len(rows), (now - self._since) * seconds / sum(each) / count, count)
            self._since = now

    def _take(self, drafted: Drafted, rows: NDArray[np.intp], position: int | NDArray[np.int64]) -> None:
        result = self._result
        for i, tokens in enumerate(drafted.tokens):
            result.tokens[rows, position + i] = tokens
            result.probabilities[rows, position + i] = drafted.probabilities[i]
            if drafted.entropy is not None:
                result.entropy[rows, position + i] = drafted.entropy[i]
