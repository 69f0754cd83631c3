"""`BatchLengths`: policy "auto" where all requests of a step verify the same number of draft tokens, which the engine
decides by the batch's size before anything is drafted.

With k draft tokens each, a step of b requests yields b y(k) tokens (`freedraft.cost.yields`) in t(b, b (1 + k))
seconds. The k of the best ratio is drafted, and 0 is one of them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from freedraft.cost.policies import Fixed
from freedraft.cost.probes import ProbeSchedule
from freedraft.cost.roofline import Roofline
from freedraft.cost.step_times import MAX_QUERY_TOKENS, StepTimes, StepTimesFile, context_bucket, row_of
from freedraft.cost.yields import ChainYields, Yields

PROBE_EVERY = 100  # steps of a batch size between probes, which take another length than the best known
_PROBE_FIRST, _PROBE_GROWTH = 8, 1.125
_PROBE_COST = 1.5  # steps without drafts, at most, as far as is known
_ENOUGH, _RATE = 2, 0.02  # times of such steps that say more than the times of others; what a new one weighs at least
_DECIDE_EVERY = 4  # steps of a range of batch sizes
_MARGIN = 0.995  # of the best ratio, which a shorter length may have

Rows = list[tuple[int, int, int]]  # (first batch size, last batch size, draft tokens per request)


def candidate_lengths(max_draft_tokens: int) -> tuple[int, ...]:
    """Draft lengths to choose from, ascending: few, because an engine captures graphs for each."""
    return tuple(sorted({max_draft_tokens >> i for i in range(3)} | {0, 1}))


def batch_range(batch: int) -> tuple[int, int]:
    """The batch sizes that have one length, `batch` among them: exact up to 8, then four ranges per octave."""
    size = 1 << max(0, (batch - 1).bit_length() - 3)
    first = (batch - 1) // size * size + 1
    return first, first + size - 1


class BatchLengths(Fixed):
    """Drafts as many tokens as the engine asks for, and says what it should ask for.

    Args:
        lengths: draft tokens per request to choose from.
        path: file to keep the step times in; clock: seconds.

    Attributes:
        yields: what draft tokens bring: those of chains, unless the engine sets others.
    """

    def __init__(
        self,
        roofline: Roofline,
        lengths: Sequence[int],
        *,
        path: Path | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(roofline.profile, max(lengths))
        self.lengths: NDArray[np.int64] = np.unique([0, *lengths])
        self.times = StepTimes(roofline)
        self._file = StepTimesFile(self.times, path, clock)
        # ln(measured / predicted) of steps by range of batch sizes, length and bucket of contexts, and how many. Step
        # times by query tokens alone do not know whether a step waited for drafts.
        self._errors: dict[tuple[int, int, int], list[float]] = {}
        self.yields: Yields = ChainYields(self.max_draft_tokens)
        self._probes = ProbeSchedule(_PROBE_FIRST, PROBE_EVERY, _PROBE_GROWTH)
        self._random = np.random.default_rng(0)
        self._decided: dict[tuple[int, int], list[int]] = {}  # length, and steps until it is decided anew
        self._probed: tuple[int, int] | None = None

    # -- what is learnt ------------------------------------------------------------------------------------------------

    def record_step(self, batch: int, query_tokens: int, context: float, seconds: float) -> None:
        """A step that only decoded has taken so long, its drafts included. context: tokens per request, on average."""
        if self.times.update(batch, query_tokens, context, seconds) and query_tokens % batch == 0:
            error = self._errors.setdefault(self._cell(batch, query_tokens // batch - 1, context), [0.0, 0.0])
            error[1] += 1.0
            now = math.log(seconds / float(self.times.uncorrected(batch, query_tokens, context)))
            error[0] += max(1.0 / error[1], _RATE) * (now - error[0])
        self._file.save_if_due()

    @staticmethod
    def _cell(batch: int, length: int, context: float) -> tuple[int, int, int]:
        return batch_range(batch)[0], length, context_bucket(context)

    def warm_up(self) -> None:
        super().warm_up()
        none = np.zeros(0, np.int32)
        self.yields.record(none, none)

    # -- what follows from it ------------------------------------------------------------------------------------------

    def rates(self, batch: int, context: float) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.float64]]:
        """Lengths that may be scheduled for a batch; tokens per second of each; seconds of a step of each."""
        lengths = self.lengths[batch * (1 + self.lengths) <= max(MAX_QUERY_TOKENS, batch)]
        tokens = self.yields.tokens(lengths)
        seconds = self.times.seconds(batch, batch * (1 + lengths), context)
        uncorrected = self.times.uncorrected(batch, batch * (1 + lengths), context)
        for i, length in enumerate(lengths.tolist()):
            error, count = self._errors.get(self._cell(batch, length, context), (0.0, 0.0))
            if count >= _ENOUGH:
                seconds[i] = uncorrected[i] * math.exp(error)
        return lengths, batch * tokens / seconds, seconds

    def best(self, batch: int, context: float) -> int:
        """The length of the most tokens per second; of such that are about as good, the shortest."""
        lengths, rates, _ = self.rates(batch, context)
        best = int(np.flatnonzero(rates >= _MARGIN * rates.max())[0])
        self.speedup = float(rates[best] / rates[0])
        return int(lengths[best])

    def decide(self, batch: int, context: float) -> Rows:
        """Lengths to schedule from now on, for this batch size and those that are told anew; the rest stay.

        To be called once per step.
        """
        at = batch_range(batch)
        rows: Rows = []
        if self._probed is not None and self._probed != at:
            rows.append((*self._probed, self._decided[self._probed][0]))
        self._probed = None
        known = self._decided.setdefault(at, [0, 0])
        if known[1] == 0:
            known[:] = self.best(batch, context), _DECIDE_EVERY
        known[1] -= 1
        length = known[0]
        if self._probes.due(row_of(batch, context), eager=length > 0):
            length, self._probed = self._probe(batch, context, length), at
        return [*rows, (*at, length)]

    def _probe(self, batch: int, context: float, length: int) -> int:
        """Half of the time the next best length, which is the one to be sure of; else any that is not known to take
        much longer than a step without drafts."""
        lengths, rates, seconds = self.rates(batch, context)
        others = lengths != length
        if self._random.random() < 0.5 and others.any():
            return int(lengths[others][rates[others].argmax()])
        return int(self._random.choice(lengths[seconds <= _PROBE_COST * seconds[0]]))

    def save(self) -> None:
        self._file.save()
