"""`Controller`: the draft tokens that maximise expected tokens per second over the batch, step by step.

For every node that the drafter offers, `Acceptance` says how likely it is to be accepted; for every number of query
tokens, `StepTimes` says how long the step would take. Taking the n likeliest nodes of the batch, a step yields
b + p_1 + ... + p_n tokens in t(b + n) seconds; the n of the best ratio is verified, and 0 is one of them (the tokens
per time of papers/knapspec_summary.txt, over a batch).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numba import njit
from numpy.typing import NDArray

from freedraft.acceptance import Acceptance
from freedraft.config import ConfigError
from freedraft.cost_model import CostModel
from freedraft.draft import DraftBatch
from freedraft.model_shape import ModelShape
from freedraft.roofline import Roofline
from freedraft.step_times import CENTRES, MAX_QUERY_TOKENS, ROWS, StepTimes, at, row_of

logger = logging.getLogger(__name__)

PROBE_EVERY = 100
"""One step in so many verifies another number of tokens than the best known, to keep step times fresh."""
_PROBE_FIRST = 8  # the same at a batch size that is new, unless nothing seems to pay there
_PROBE_COST = 1.5  # plain steps, at most, as far as is known
_IDLE_SHARE = 0.005  # of time, for drafting while nothing is verified
_IDLE_MOST = 256
_GAIN_RATE = 0.1
_SAVE_SECONDS = 60.0
_RANK_BINS = 256
_FREE = -1  # no forced number of tokens


@njit(cache=True, nogil=True)
def _rank(p, counts, order):
    """Probabilities of all draft nodes into `order`, falling: sorted roughly by bins, then by insertion."""
    place = np.zeros(_RANK_BINS + 1, np.int32)
    for b in range(len(counts)):
        for i in range(1, counts[b]):
            place[_RANK_BINS - int(p[b, i] * (_RANK_BINS - 1))] += 1
    for k in range(_RANK_BINS):
        place[k + 1] += place[k]
    total = place[_RANK_BINS]
    for b in range(len(counts)):
        for i in range(1, counts[b]):
            k = _RANK_BINS - 1 - int(p[b, i] * (_RANK_BINS - 1))
            order[place[k]] = p[b, i]
            place[k] += 1
    for k in range(1, total):
        v, i = order[k], k
        while i > 0 and order[i - 1] < v:
            order[i] = order[i - 1]
            i -= 1
        order[i] = v
    return total


@njit(cache=True, nogil=True)
def share_tokens(p, counts, table, drafting, forced, order):
    """Cut the chains to the nodes that pay, the likeliest of the whole batch first.

    Args:
        p: float64 [B, N], probability of every node, falling along each path.
        counts: int32 [B], in: nodes drafted, out: nodes kept.
        table: float64, seconds of a step by query tokens, see `StepTimes.table`.
        drafting: seconds that drafting takes.
        forced: take so many nodes (as far as there are), whatever they are worth; -1: the best number.
        order: float64 [>= B * N], scratch.

    Returns:
        (draft nodes kept, expected gain over not drafting at all, as a share of it, nodes kept of the longest chain).
    """
    batch = len(counts)
    plain = batch / at(table, batch)
    total = _rank(p, counts, order)
    best, best_rate, tokens = 0, plain, float(batch)
    at_best = tokens
    for n in range(1, total + 1):
        if forced >= 0 and n > forced:
            break
        tokens += order[n - 1]
        rate = tokens / at(table, batch + n)
        if forced >= 0 or rate > best_rate:
            best, best_rate, at_best = n, rate, tokens
    if forced == 0:
        best, at_best = 0, float(batch)
    seconds = at(table, batch + best)
    gain = at_best / (seconds + drafting) / plain - 1.0
    least = order[best - 1] if best > 0 else 2.0
    ties = 0  # nodes just as likely as the last one kept, that are kept
    for n in range(best):
        if order[n] == least:
            ties += 1
    longest = 1
    for b in range(batch):
        kept = min(counts[b], 1)
        for i in range(1, counts[b]):
            if p[b, i] > least:
                kept = i + 1
            elif p[b, i] == least and ties > 0:
                ties -= 1
                kept = i + 1
            else:
                break
        counts[b] = kept
        longest = max(longest, kept)
    return best, gain, longest


@njit(cache=True, nogil=True)
def share_width(p, counts, table, drafting, widths, forced):
    """Cut all trees to the one width, out of `widths`, that pays best; every request then costs that many tokens.

    Args: as for `share_tokens`; widths: int32, ascending; forced: an index of widths, or -1.

    Returns:
        (width, expected gain over not drafting at all, as a share of it, nodes kept of the largest tree).
    """
    batch = len(counts)
    plain = batch / at(table, batch)
    most = 1
    for b in range(batch):
        most = max(most, counts[b])
    tokens, done, best, best_rate, at_best = float(batch), 1, 1, plain, float(batch)
    for k in range(len(widths)):
        width = widths[k]
        if width <= 1:
            continue
        for b in range(batch):
            for i in range(done, min(width, counts[b])):
                tokens += p[b, i]
        done = width
        rate = tokens / at(table, batch * width)
        if forced == k or (forced < 0 and rate > best_rate):
            best, best_rate, at_best = width, rate, tokens
        if width >= most:
            break
    seconds = at(table, batch * best)
    for b in range(batch):
        counts[b] = min(counts[b], best)
    return best, at_best / (seconds + drafting) / plain - 1.0, min(most, best)


class Controller:
    """Policy "auto" for one engine. One decoding step is `observe`, `limit`, then the draft, then `cut`, then `end`.

    Args:
        caps: how much a request may draft at most.
        roofline: where step times start from.
        widths: numbers of nodes per request that the engine can verify, root included, if they must be the same for all
            requests; None where every request may have its own.
        path: file to keep the step times in.
        clock: seconds.
    """

    def __init__(
        self,
        caps: CostModel,
        roofline: Roofline,
        *,
        widths: Sequence[int] | None = None,
        path: Path | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.caps = caps
        self.times = StepTimes(roofline)
        self.acceptance = Acceptance()
        self.widths = None if widths is None else np.array(widths, np.int32)
        self.gain = 0.0
        self.drafting_seconds = 0.0
        self._path = path
        self._clock = clock
        self._drafts: list[DraftBatch] = []
        self._ids: list[str] = []
        self._ended: float | None = None
        self._began = 0.0
        self._context = 1.0
        self._steps = [0] * ROWS
        self._probed = [0] * ROWS
        self._idle_left = 0
        self._longest = float(caps.max_draft_tokens)
        self._random = np.random.default_rng(0)
        self._order = np.zeros(0)
        self._saved = clock()
        self._p = np.zeros((0, 0))
        self.chosen = 0
        if path is not None:
            self.times.load(path)
        self._warm_up()

    # -- one step ------------------------------------------------------------------------------------------------------

    def observe(
        self,
        request_ids: Sequence[str],
        source: NDArray[np.int32],
        starts: NDArray[np.int64],
        ends: NDArray[np.int64],
        *,
        context: float,
        query_tokens: int | None,
    ) -> None:
        """The step is over whose drafts `cut` chose: learn its time and what was accepted.

        Args:
            request_ids: the B requests that go on.
            source, starts, ends: source[starts[b]:ends[b]] are the tokens that request b gained since.
            context: mean tokens per request, now.
            query_tokens: that the step verified over the batch, roots included; None if it did other work too.
        """
        now = self._began = self._clock()
        same = request_ids == self._ids
        if same and query_tokens is not None and self._ended is not None and self._ids:
            self.times.observe(len(self._ids), query_tokens, self._context, now - self._ended)
        self._context = context
        if self._drafts:
            if same:
                rows = np.arange(len(self._ids), dtype=np.int32)
            else:
                at = {request_id: i for i, request_id in enumerate(request_ids)}
                rows = np.array([at.get(request_id, -1) for request_id in self._ids], np.int32)
            for draft in self._drafts:
                self.acceptance.learn(draft, rows, source, starts, ends)
            self._drafts = []

    def limit(self, batch: int, most: int | None = None) -> int:
        """Draft tokens per request that are worth asking the drafter for; 0: do not draft.

        Args:
            most: what the engine allows in this step.
        """
        most = self.caps.per_request(batch) if most is None else min(most, self.caps.per_request(batch))
        if batch == 0:
            return 0
        if self._idle_left > 0:
            self._idle_left -= 1
            return 0
        return max(0, min(most, int(2.0 * self._longest) + 2, MAX_QUERY_TOKENS // max(batch, 1) - 1))

    def price(self, batch: int) -> NDArray[np.float64]:
        """Seconds of a step of `batch` requests at each number of query tokens in `CENTRES`."""
        return self.times.table(batch, self._context)

    def worth(self, draft: DraftBatch) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        """What `cut` would make of a draft, which stays as it is.

        Returns:
            float64 [B, N], the estimated probability of each draft node, 0 for everything else; int32 [B], nodes that
            `cut` would keep, roots included.
        """
        p = self.acceptance.probabilities(draft)
        counts = draft.counts.copy()
        table = self.price(draft.batch_size)
        if self.widths is None:
            share_tokens(p, counts, table, 0.0, _FREE, np.empty(p.size))
        else:
            share_width(p, counts, table, 0.0, self.widths, _FREE)
        nodes = np.arange(draft.max_nodes)
        return np.where((nodes > 0) & (nodes < draft.counts[:, None]), p, 0.0), counts

    def paused(self, seconds: float) -> None:
        """Time since `observe` that is not the drafter's own, and was decided upon by itself."""
        self._began += seconds

    def cut(self, draft: DraftBatch, *others: DraftBatch) -> int:
        """Shorten `draft` (its counts, in place) to what should be verified.

        The arrays of `draft`, and of `others`, must stay as they are until the next `observe`.

        Args:
            others: drafts of the same requests that are not verified, and still say something of acceptance.

        Returns:
            draft tokens over the batch; with widths, the width.
        """
        batch = draft.batch_size
        context = self._context
        if self._p.shape[0] < batch or self._p.shape[1] < draft.max_nodes:
            self._p = np.empty((max(batch, 2 * self._p.shape[0]), draft.max_nodes))
            self._order = np.empty(self._p.size)
        p = self._p[:batch, : draft.max_nodes]
        self.acceptance.calibrate(draft, p)
        drafted = draft.counts.copy()
        table = self.times.table(batch, context)
        forced = self._probe(batch, context, draft.max_nodes - 1, table)
        if self.widths is None:
            self.chosen, gain, longest = share_tokens(
                p, draft.counts, table, self.drafting_seconds, forced, self._order
            )
        else:
            self.chosen, gain, longest = share_width(p, draft.counts, table, self.drafting_seconds, self.widths, forced)
        if forced == _FREE:
            self.gain += _GAIN_RATE * (gain - self.gain)
        self._longest = max(longest - 1.0, 0.97 * self._longest)
        drawn = DraftBatch(draft.tokens, draft.parents, draft.depths, draft.scores, drafted, draft.kinds)
        self._drafts = [drawn, *others]
        return self.chosen

    def end(self, request_ids: Sequence[str]) -> None:
        """All is decided for the step that these requests begin now."""
        now, batch = self._clock(), len(request_ids)
        self._ids = list(request_ids)
        if self._drafts:
            spent = now - self._began
            if 0.0 < spent < 1.0:
                rate = 0.5 if self.drafting_seconds == 0.0 else 0.05
                self.drafting_seconds += rate * (min(spent, 4 * self.drafting_seconds or spent) - self.drafting_seconds)
            if self.gain < 0.0:
                step = self.times.seconds(batch, batch, self._context)
                idle = self.drafting_seconds / (_IDLE_SHARE * max(step, 1e-6))
                self._idle_left = min(int(idle), _IDLE_MOST)
        self._ended = now
        if self._path is not None and now - self._saved > _SAVE_SECONDS:
            self._saved = now
            self.save()

    def save(self) -> None:
        """Write the step times to the file they are kept in, if there is one."""
        if self._path is not None:
            try:
                self.times.save(self._path)
            except OSError as error:
                logger.warning("freedraft: cannot write step times to %s (%s); they are not kept", self._path, error)
                self._path = None

    def _probe(self, batch: int, context: float, longest: int, table: NDArray[np.float64]) -> int:
        """Now and then, a number of tokens (an index of widths) at random: what is never tried is never known. None
        that is known to take much longer than plain decoding."""
        row = row_of(batch, context)
        self._steps[row] += 1
        every = PROBE_EVERY
        if self.chosen > (0 if self.widths is None else 1):
            every = min(every, _PROBE_FIRST + self._steps[row] // 8)
        if self._steps[row] - self._probed[row] < every or longest < 1:
            return _FREE
        self._probed[row] = self._steps[row]
        plain = np.interp(batch, CENTRES, table)
        most = int(CENTRES[table <= _PROBE_COST * plain].max(initial=batch))
        if self.widths is not None:
            return int(self._random.integers(max(1, int(np.searchsorted(self.widths, most // batch, side="right")))))
        octaves = math.log2(max(1, min(most - batch, batch * longest)))
        return int(2 ** (self._random.random() * (octaves + 1)) - 1)

    def _warm_up(self) -> None:
        """Compile, or load from the cache, everything that a step calls."""
        draft = DraftBatch.empty(1, 2)
        draft.counts[:] = 2
        draft.depths[:, 1] = 1
        draft.scores[:] = 1.0, 0.5
        other = StepTimes(self.times.roofline)
        other.observe(1, 1, 1.0, 1.0)
        none = np.zeros(1, np.int64)
        Acceptance().learn(draft, np.full(1, -1, np.int32), np.zeros(1, np.int32), none, none)
        p = np.ones((1, 2))
        self.acceptance.calibrate(draft, p)
        table = other.table(1, 1.0)
        if self.widths is None:
            share_tokens(p, draft.counts, table, 0.0, _FREE, np.zeros(2))
        else:
            share_width(p, draft.counts, table, 0.0, self.widths, _FREE)


def make_controller(
    caps: CostModel,
    config: Mapping[str, Any],
    *,
    dtype: str,
    tensor_parallel: int,
    mask: bool = False,
    widths: Sequence[int] | None = None,
    path: Path | None = None,
) -> Controller | None:
    """The controller of policy "auto" for a model that an engine serves; None, with one warning, where the model's
    configuration cannot be read: the rule of `caps` then decides.

    Args:
        config: the model's Hugging Face configuration as a dictionary; the rest: see `Roofline` and `Controller`.
    """
    try:
        shape = ModelShape.from_config(config, dtype=dtype)
    except ConfigError as error:
        logger.warning("freedraft: %s: policy 'knee' decides instead of 'auto'", error)
        return None
    return Controller(caps, Roofline(shape, caps.profile, tensor_parallel, mask), widths=widths, path=path)
