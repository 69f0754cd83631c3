"""`Passes`: the draft passes of a round over some requests of a step, and `Round`: what they drafted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from freedraft.draft_model import DraftRound


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


class Passes:
    """The draft passes of a round, each recipe's in turn.

    Args:
        draft_round: of the engine's draft model; draft_passes: of each recipe.
        places: intp [B], of each request's recipe.
        result: what is filled.
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
        record: Callable[[int, int, float, int], None],
        since: float,
    ) -> None:
        self._draft_round, self._draft_passes, self._places = draft_round, draft_passes, places
        self._result, self._record, self._since = result, record, since
        self.read = np.zeros(len(result.drafted), np.intp)

    def run(self, rows: NDArray[np.intp], tokens: NDArray[np.int32], position: int, count: int) -> None:
        """So many passes from `position` on; tokens: int32 [B], the newest of each request."""
        for number, part in self._by_recipe(rows):
            self._run(number, rows[part], tokens[rows[part]], position, count)
        self.read[rows] = position + count

    def check(
        self, rows: NDArray[np.intp], roots: NDArray[np.int32], chains: NDArray[np.int32], lengths: NDArray[np.int32]
    ) -> None:
        """One pass over roots and the first tokens of chains. What is drafted behind a token that the draft would have
        chosen itself is what so many passes would have drafted; what is behind another one is not read.

        Args:
            rows: intp [R]; roots: int32 [B]; chains: int32 [R, K], lengths: int32 [R], tokens of them to check.
        """
        nodes = np.concatenate((roots[rows, None], chains), 1)
        for number, part in self._by_recipe(rows):
            inside = np.arange(nodes.shape[1]) <= lengths[part, None]
            row, position = np.nonzero(inside)
            self._run(number, rows[part][row], nodes[part][inside], position, 1)
        places = np.arange(min(chains.shape[1], self._result.tokens.shape[1]))
        drafted = self._result.tokens[rows, : len(places), 0]
        same = (drafted == chains[:, : len(places)]) & (places < lengths[:, None])
        self.read[rows] = 1 + np.cumprod(same, 1).sum(1)

    def _by_recipe(self, rows: NDArray[np.intp]) -> Iterator[tuple[int, NDArray[np.intp]]]:
        places = self._places[rows]
        for number in np.unique(places).tolist():
            yield number, np.flatnonzero(places == number)

    def _run(
        self,
        number: int,
        rows: NDArray[np.intp],
        tokens: NDArray[np.int32],
        position: int | NDArray[np.int64],
        count: int,
    ) -> None:
        result = self._result
        drafted = self._draft_round.run(self._draft_passes[number], rows, tokens, position, count)
        for i in range(count):
            result.tokens[rows, position + i] = drafted.tokens[i]
            result.probabilities[rows, position + i] = drafted.probabilities[i]
            if drafted.entropy is not None:
                result.entropy[rows, position + i] = drafted.entropy[i]
        now = time.perf_counter()
        self._record(number, len(rows), (now - self._since) / count, count)
        self._since = now
