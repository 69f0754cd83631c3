"""`BatchLengths`: policy "auto" for engines that decide one number of draft tokens for all requests of a step, by batch
size and before drafting.

With k draft tokens each, a step of b requests yields b y(k) tokens in t(b, b (1 + k)) seconds; `Acceptance` estimates
y(k) from the newest drafts. The k of the best ratio is drafted; it may be 0. While nothing is drafted, the drafter
still runs occasionally, which costs little and shows what drafts would bring.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from freedraft.cost.allocation import WORTH
from freedraft.cost.controller import Controller
from freedraft.cost.measured import Head, Measured
from freedraft.cost.probes import Probes
from freedraft.cost.step_times import MAX_QUERY_TOKENS, context_bucket, row_of
from freedraft.draft import DraftBatch
from freedraft.step import Step

_ENOUGH, _RATE = 2, 0.02  # times of a cell that are enough to use them alone; minimum weight of a new one
_PRICE_EVERY = 4  # steps per range of batch sizes
_MARGIN = 0.995  # share of the best ratio at which a shorter length is preferred
_SHARE = 0.25  # of a step that drafting takes at most; beside a head's passes, it is hidden up to it
_REQUESTS = 2.0  # memory of expected acceptance, in requests

# SSSD's chains on recorded answers of Llama-3.1-8B (bench/results/replay.json): tokens per step by nodes of a draft
CHAIN_TOKENS_PER_STEP = {1: 1.0, 2: 1.307, 3: 1.425, 5: 1.491, 9: 1.52, 17: 1.527, 33: 1.529}

Rows = list[tuple[int, int, int]]  # (first batch size, last batch size, draft tokens per request)


def expected_tokens(nodes: np.ndarray, curve: dict[int, float]) -> np.ndarray:
    """Tokens per step, interpolated linearly in the logarithm of the nodes; constant beyond the last known ones."""
    return np.interp(np.log2(nodes), np.log2(list(curve)), list(curve.values()))


def candidate_lengths(max_draft_tokens: int) -> tuple[int, ...]:
    """Draft lengths to choose from, ascending: few, because an engine captures graphs for each; short ones for large
    batches. With the roots, they fill the tiles of matrix kernels, whose rows are a power of two."""
    return (0, *(length for length in (1, 3, 7, 15) if 3 * length <= 2 * max_draft_tokens), max_draft_tokens)


def batch_range(batch: int) -> tuple[int, int]:
    """The range of batch sizes around `batch` that share a length: exact up to 8, then four ranges per octave."""
    size = 1 << max(0, (batch - 1).bit_length() - 3)
    first = (batch - 1) // size * size + 1
    return first, first + size - 1


class BatchLengths(Controller):
    """Policy "auto" on model runner V2: drafts the number of tokens that the engine has scheduled, and recommends the
    next one.

    Args:
        lengths: draft tokens per request to choose from; the shortest are those of a `head`, if there is one.
    """

    measured: Measured

    def __init__(self, measured: Measured, lengths: Sequence[int], head: Head | None = None) -> None:
        super().__init__(measured.times.roofline.profile, max(lengths), measured=measured, head=head)
        self._shortest = head.length if head else 0
        self.lengths: NDArray[np.int64] = np.unique([self._shortest, *lengths])
        self.probes = Probes()
        # ln(measured / predicted) of steps, and their number, by range of batch sizes, length and bucket of contexts.
        # Step times by query tokens alone do not include waiting for drafts.
        self._errors: dict[tuple[int, int, int], tuple[float, int]] = {}
        # Accepted draft tokens per request, by length; the last draft, its length, and its expectation
        self._gain = expected_tokens(1 + self.lengths, CHAIN_TOKENS_PER_STEP) - 1.0
        self._newest: tuple[DraftBatch, int, NDArray[np.float64]] | None = None
        self._verified = 0  # draft tokens of it that are verified
        self._step_seconds, self._asked = 1.0, 0
        self._drafting_seconds = 1e-9  # per request that was drafted for
        # For `settle`: the last step; its draft, draft tokens per request asked for, and seconds of drafting
        self._step: Step | None = None
        self._cut: tuple[DraftBatch, int, float] | None = None
        # Seconds of a step of each length that may be scheduled, and steps left with them; by range of batch sizes
        self._prices: dict[tuple[int, int], tuple[NDArray[np.float64], int]] = {}
        self._probed: tuple[int, int] | None = None

    # -- learning ------------------------------------------------------------------------------------------------------

    def learn(self, step: Step) -> None:
        self.settle()
        self._step = step

    def rests(self) -> bool:
        self.settle()
        acceptance = self.measured.acceptance
        return not (acceptance.follows or acceptance.rises) and self.probes.take_rest()

    def plan(self, step: Step) -> int:
        self.measured.began, self.chosen = self.measured.clock(), None
        if step.most:
            most, n = max(1, int(_SHARE * self._step_seconds / self._drafting_seconds)), step.batch_size
            if most < n:  # best are those that accepted drafts, worst those that rejected them
                worth = self.probes.random.random(n) + np.where(step.drafted > 0, 2 * step.accepted - 1, 0)
                self.chosen = worth >= np.sort(worth)[-most]
            self._asked = min(self.max_draft_tokens, step.most)
            self.budget = step.batch_size * self._asked
        else:
            self.settle()
            waits = self.probes.take_rest() and not self.measured.acceptance.rises
            self._asked = 0 if waits else self.max_draft_tokens
        return self._asked

    def cut(self, draft: DraftBatch) -> None:
        """Cuts nothing: the engine has decided the length."""
        seconds = self.measured.clock() - self.measured.began
        self._drafting_seconds = max(seconds, 1e-9) / max(1, int((draft.counts > 0).sum()))
        self._cut = draft, self._asked, seconds

    def settle(self) -> None:
        """Learn from the step that `learn` was given, then from the draft that `cut` was. Both must not have changed;
        the draft is copied, since the next one takes its memory."""
        step, cut, self._step, self._cut = self._step, self._cut, None, None
        if step is not None:
            self.measured.accept(step)
            if self._newest is not None:  # earlier expectations are wrong by the same factor
                draft, asked, expected = self._newest
                if self.head is not None and self._verified > self._shortest:
                    at = np.searchsorted(self.lengths, self._verified)
                    self.head.learn_tails(step, float(expected[at] - expected[0]))
                self._gain *= self._expected(draft, asked) / np.maximum(expected, 1e-9)
                self._newest = None
        if cut is not None:
            draft, asked, seconds = cut
            draft = draft.copy()
            if not self.head or seconds > _SHARE * self._step_seconds:  # else it is hidden behind the head's passes
                self.probes.begin_rest(seconds, self._step_seconds)
            self.measured.acceptance.follow(draft)
            self._newest = draft, asked, self._expected(draft, asked)
            self._verified = asked if self.budget else 0
            rate = min(1.0, draft.batch_size / _REQUESTS)
            self._gain += rate * (self._newest[2] - self._gain)

    def _expected(self, draft: DraftBatch, asked: int) -> NDArray[np.float64]:
        """float64 [L]: mean accepted draft tokens per request for each of `lengths`. asked: draft tokens requested from
        the drafter."""
        p, nodes = np.zeros((draft.batch_size, asked + 1)), np.arange(asked + 1)
        known = self.measured.acceptance.probabilities(draft)[:, : asked + 1]
        p[:, : known.shape[1]] = known
        p[(nodes == 0) | (nodes >= draft.counts[:, None])] = 0.0
        tokens = np.cumsum(p.mean(0))
        # Beyond `asked`: after a node of probability q, m more nodes bring q (r + r^2 + ... + r^m), or what a longer
        # draft brought last time.
        more, at = np.maximum(self.lengths - asked, 0), int(np.searchsorted(self.lengths, asked, side="right")) - 1
        last = p[:, -1:]
        ratio = last ** (1 / asked) * (asked**2 / (asked**2 + 1))
        tail = (last * ratio * (1.0 - ratio**more) / (1.0 - ratio)).mean(0)
        expected: NDArray[np.float64] = tokens[np.minimum(self.lengths, asked)] + tail
        seen = self._gain * (expected[at] / max(float(self._gain[at]), 1e-9))
        return np.where(more > 0, np.maximum(expected, seen), expected)

    def record_step(self, batch: int, query_tokens: int, context: float, seconds: float) -> None:
        """Record the seconds of a step that only decoded, drafting included. context: mean tokens per request."""
        self._step_seconds, times = seconds, self.measured.times
        if times.update(batch, query_tokens, context, seconds) and query_tokens % batch == 0:
            cell = self._cell(batch, query_tokens // batch - 1, context)
            error, count = self._errors.get(cell, (0.0, 0))
            newest = math.log(seconds / float(times.uncorrected(batch, query_tokens, context)))
            self._errors[cell] = error + max(1.0 / (count + 1), _RATE) * (newest - error), count + 1
        times.save_if_due()

    @staticmethod
    def _cell(batch: int, length: int, context: float) -> tuple[int, int, int]:
        return batch_range(batch)[0], length, context_bucket(context)

    def interrupt(self) -> None:
        super().interrupt()
        self._newest = self._step = self._cut = None

    # -- decisions -----------------------------------------------------------------------------------------------------

    def tokens(self) -> NDArray[np.float64]:
        """Expected tokens per step and request at present, for each of `lengths`."""
        if self.head is not None:
            return 1.0 + self.head.accepted + self.head.share * (self._gain - self._gain[0])
        return 1.0 + self._gain

    def seconds(self, batch: int, context: float) -> NDArray[np.float64]:
        """float64: of a step of each of `lengths` that may be scheduled for a batch."""
        lengths = self.lengths[batch * (1 + self.lengths) <= max(MAX_QUERY_TOKENS, batch * (1 + self._shortest))]
        seconds = self.measured.times.seconds(batch, batch * (1 + lengths), context)
        uncorrected = self.measured.times.uncorrected(batch, batch * (1 + lengths), context)
        for i, length in enumerate(lengths.tolist()):
            error, count = self._errors.get(self._cell(batch, length, context), (0.0, 0))
            if count >= _ENOUGH:
                seconds[i] = uncorrected[i] * math.exp(error)
        return seconds

    def best(self, seconds: NDArray[np.float64]) -> int:
        """The shortest length with about the most tokens per second, by the result of `seconds`."""
        rates = self.tokens()[: len(seconds)] / seconds
        best = int(np.flatnonzero(rates >= _MARGIN * rates.max())[0])
        if self.head is not None and rates[best] < WORTH * rates[0]:
            best = 0
        self.speedup = float(rates[best] / rates[0])
        return int(self.lengths[best])

    def decide(self, batch: int, context: float) -> Rows:
        """Changed lengths to schedule: of this batch size, and of a probed one. Call once per step."""
        self.settle()
        at = batch_range(batch)
        rows: Rows = []
        if self._probed is not None and self._probed != at:
            rows.append((*self._probed, self.best(self._prices[self._probed][0])))
        self._probed = None
        seconds, left = self._prices.get(at, (None, 0))
        if seconds is None or left == 0:
            seconds, left = self.seconds(batch, context), _PRICE_EVERY
        self._prices[at] = seconds, left - 1
        length = self.best(seconds)
        if self.probes.due(row_of(batch, context), eager=length > self._shortest):
            length, self._probed = self._probe(seconds, length), at
        return [*rows, (*at, length)]

    def _probe(self, seconds: NDArray[np.float64], length: int) -> int:
        """A length to probe: half of the time the runner-up, else any length that is not known to be much slower than
        plain."""
        lengths = self.lengths[: len(seconds)]
        others = lengths != length
        if self.probes.random.random() < 0.5 and others.any():
            return int(lengths[others][(self.tokens()[: len(seconds)] / seconds)[others].argmax()])
        return int(self.probes.random.choice(lengths[self.probes.affordable(seconds)]))
