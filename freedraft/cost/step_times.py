"""`StepTimes`: how long steps and draft passes take here: the roofline, corrected by what is measured while serving."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Hashable
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from freedraft.compiled import compiled
from freedraft.cost.roofline import Roofline
from freedraft.draft_pass import Recipe
from freedraft.files import write_json_atomically

logger = logging.getLogger(__name__)

FORMAT = "freedraft-step-times-2"
MAX_QUERY_TOKENS = 8192
_EXACT = 16  # query tokens up to here have a bucket each, then four per octave


def _centres() -> list[int]:
    edges = [round(_EXACT * 2 ** (i / 4)) for i in range(4 * int(math.log2(MAX_QUERY_TOKENS / _EXACT)) + 1)]
    return [*range(1, _EXACT), *edges]


# Query tokens at which step times are kept; between two of them they are interpolated
CENTRES: NDArray[np.float64] = np.array(_centres(), np.float64)
BUCKETS = len(CENTRES)
BATCHES = 10  # 1, 2, 3-4, 5-8, ..., 129-256, more
CONTEXTS = 10  # tokens per request: up to 512, 1 Ki, 2 Ki, ..., 128 Ki, more
BUCKET_OF: NDArray[np.int32] = np.searchsorted(
    (CENTRES[1:] + CENTRES[:-1]) / 2, np.arange(MAX_QUERY_TOKENS + 1), side="right"
).astype(np.int32)

ROWS = BATCHES * CONTEXTS
_LEFT: NDArray[np.int32] = np.clip(
    np.searchsorted(CENTRES, np.arange(MAX_QUERY_TOKENS + 1), side="right") - 1, 0, BUCKETS - 2
).astype(np.int32)
_SHARE: NDArray[np.float64] = np.clip(
    (np.arange(MAX_QUERY_TOKENS + 1) - CENTRES[_LEFT]) / (CENTRES[_LEFT + 1] - CENTRES[_LEFT]), 0.0, 1.0
)

_RATE = 0.01  # of a new time against what is known, once a bucket has been seen often enough
_LEVEL_RATE = 0.08  # faster: a machine that slows down does so for every kind of step
_SAVE_SECONDS = 60.0
_CLIP = 0.25  # ln: a time further off than this counts as this far off
_ABSURD = math.log(30.0)  # ln: beyond this a time says nothing of the step
_PATIENCE = 20  # absurd times in a row that are taken for the truth


def batch_bucket(batch: int) -> int:
    return min((batch - 1).bit_length(), BATCHES - 1)


def context_bucket(context: float) -> int:
    return min((math.ceil(max(context, 1.0)) - 1).bit_length() - 9, CONTEXTS - 1) if context > 512 else 0


def row_of(batch: int, context: float) -> int:
    """Where steps of this batch size and mean context are kept: 0 .. ROWS - 1."""
    return batch_bucket(batch) * CONTEXTS + context_bucket(context)


@compiled(inline="always")
def at(table, query_tokens):
    """The value of a table over `CENTRES` at a number of query tokens (compiled code only)."""
    q = min(query_tokens, MAX_QUERY_TOKENS)
    i, share = _LEFT[q], _SHARE[q]
    return table[i] + share * (table[i + 1] - table[i])


@compiled
def _correct(delta, count, row, i, error):
    """Learn one time of bucket i of a row: `error` is ln(measured / predicted), already without the common level."""
    seen = count[row, i]
    if seen == 0.0:
        delta[row, i] = error
    else:
        step = error - delta[row, i]
        clip = _CLIP if seen >= 3.0 else 3.0 * _CLIP
        step = min(max(step, -clip), clip)
        delta[row, i] += max(_RATE, 1.0 / (seen + 1.0)) * step
    count[row, i] = min(seen + 1.0, 1e6)


@compiled
def _fill(delta, count, out):
    """Write the corrections of a row for every bucket into `out`: a bucket that was seen rarely is drawn towards its
    neighbours, an unseen one takes theirs. 0 everywhere where the row has none."""
    n = len(delta)
    out[:] = 0.0
    last = -1
    for i in range(n):
        if count[i] > 0.0:
            if last < 0:
                out[:i] = delta[i]
            else:
                for k in range(last + 1, i):
                    share = (k - last) / (i - last)
                    out[k] = (1.0 - share) * delta[last] + share * delta[i]
            out[i] = delta[i]
            last = i
    if last < 0:
        return
    out[last + 1 :] = delta[last]
    before = -1
    for i in range(n):
        if count[i] <= 0.0:
            continue
        if count[i] < 8.0:
            after = -1
            for k in range(i + 1, n):
                if count[k] > 0.0:
                    after = k
                    break
            if before >= 0 or after >= 0:
                if before < 0:
                    near = delta[after]
                elif after < 0:
                    near = delta[before]
                else:
                    share = (i - before) / (after - before)
                    near = (1.0 - share) * delta[before] + share * delta[after]
                trust = count[i] / (count[i] + 1.0)
                out[i] = trust * delta[i] + (1.0 - trust) * near
        before = i


def _eighth_octaves(context: float) -> int:
    """Contexts that the roofline is asked for, eight per octave: within a bucket times grow as it says."""
    return round(8.0 * math.log2(max(context, 64.0)))


class _Corrections:
    """ln(measured / predicted) by row (batch size, context) and bucket of query tokens, and how often each was seen."""

    def __init__(self, rows: int) -> None:
        self.delta = np.zeros((rows, BUCKETS))
        self.count = np.zeros((rows, BUCKETS))
        self.stale = np.ones(rows, np.bool_)
        self._filled = np.zeros((rows, BUCKETS))
        self._alike: dict[int, int] = {}

    def learn(self, row: int, bucket: int, error: float) -> None:
        if not self.count[row, bucket]:
            self._alike.clear()
        _correct(self.delta, self.count, row, bucket, error)
        self.stale[:] = True

    def row(self, row: int) -> NDArray[np.float64]:
        """float64 [BUCKETS]: the corrections of a row. Where it has none they grow with query tokens as those of the
        row most like it do, so that what verification costs is not found out anew at every context."""
        out = self._filled[row]
        if self.stale[row]:
            self.stale[row] = False
            alike = self._alike.get(row)
            if alike is None:
                alike = self._alike[row] = self._most_alike(row)
            if alike < 0:
                _fill(self.delta[row], self.count[row], out)
            else:
                growth = np.empty(BUCKETS)
                _fill(self.delta[alike], self.count[alike], growth)
                _fill(self.delta[row] - growth, self.count[row], out)
                out += growth
        return out

    def _most_alike(self, row: int) -> int:
        """The nearest other row that says something of growth, or anything at all; -1 for none."""
        seen = (self.count > 0).sum(1)
        seen[row] = 0
        known = np.flatnonzero(seen > (seen.max() > 1))
        if not len(known):
            return -1
        distance = abs(known // CONTEXTS - row // CONTEXTS) + 0.3 * abs(known % CONTEXTS - row % CONTEXTS)
        return int(known[distance.argmin()])


class StepTimes:
    """Seconds of a step of the model by batch size, query tokens and context, and of a draft pass by recipe, batch size
    and context: roofline * exp(level + correction).

    The level follows the machine (its clock, its other load); the corrections, by buckets, say how this kind of step
    differs from what the roofline predicts. Only ratios decide how much to draft, and a change of the level leaves them
    alone. Outliers are clipped, absurd times dropped."""

    def __init__(self, roofline: Roofline) -> None:
        self.roofline = roofline
        self._steps = _Corrections(ROWS)
        self._passes: dict[Recipe, _Corrections] = {}
        self._level = 0.0
        self._seen = 0
        self._absurd = 0
        self._warm: set[tuple[Recipe, int]] = set()
        self._priors: dict[tuple[Hashable, int], NDArray[np.float64]] = {}

    @property
    def seen(self) -> int:
        """Times learnt from."""
        return self._seen

    def count(self, batch: int, query_tokens: int, context: float) -> float:
        """How often steps of this bucket were timed."""
        return float(self._steps.count[row_of(batch, context), BUCKET_OF[min(query_tokens, MAX_QUERY_TOKENS)]])

    def update(self, batch: int, query_tokens: int, context: float, seconds: float) -> bool:
        """Learn from one step. Returns False where the time cannot be one of a step (not positive, not finite, absurdly
        far off) and was dropped."""
        if not 1 <= batch <= query_tokens <= MAX_QUERY_TOKENS:
            return False
        prior = float(np.interp(query_tokens, CENTRES, self._log_steps(batch, context)))
        return self._learn(self._steps, row_of(batch, context), int(BUCKET_OF[query_tokens]), prior, seconds)

    def update_pass(self, recipe: Recipe, batch: int, context: float, seconds: float) -> bool:
        """Learn from one draft pass over `batch` requests. The first one of its kind compiles and warms up, so that its
        time is dropped."""
        if not 1 <= batch <= MAX_QUERY_TOKENS:
            return False
        corrections = self._corrections(recipe)
        row, bucket = context_bucket(context), int(BUCKET_OF[batch])
        if not self.warm(recipe, batch):
            self._warm.add((recipe, bucket))
            return False
        prior = float(np.interp(batch, CENTRES, self._log_passes(recipe, context)))
        return self._learn(corrections, row, bucket, prior, seconds)

    def warm(self, recipe: Recipe, batch: int) -> bool:
        """Whether such a pass has run before, so that it does not compile any more."""
        return (recipe, int(BUCKET_OF[min(batch, MAX_QUERY_TOKENS)])) in self._warm

    def _learn(self, corrections: _Corrections, row: int, bucket: int, prior: float, seconds: float) -> bool:
        if not (seconds > 0.0 and math.isfinite(seconds)):
            return False
        error = math.log(seconds) - prior - self._level
        if self._seen == 0:
            self._level += error
            error = 0.0
        known = corrections.row(row)[bucket]
        if abs(error - known) > _ABSURD:
            self._absurd += 1
            if self._absurd < _PATIENCE:
                return False
            self._level += error - known  # a different machine, or a clock that was wrong before
            error = known
        self._absurd = 0
        if corrections.count[row, bucket] >= 3:  # before, the roofline's shape is what is wrong
            self._level += _LEVEL_RATE * min(max(error - known, -_CLIP), _CLIP)
        corrections.learn(row, bucket, error)
        self._seen += 1
        return True

    def table(self, batch: int, context: float) -> NDArray[np.float64]:
        """float64 [BUCKETS]: seconds of a step of `batch` requests at each number of query tokens in `CENTRES`."""
        return np.exp(self._log_steps(batch, context) + self._steps.row(row_of(batch, context)) + self._level)

    def seconds(self, batch: int, query_tokens: ArrayLike, context: float) -> NDArray[np.float64]:
        """Seconds of one step, by query tokens."""
        return np.interp(np.asarray(query_tokens, np.float64), CENTRES, self.table(batch, context))

    def uncorrected(self, batch: int, query_tokens: ArrayLike, context: float) -> NDArray[np.float64]:
        """What the roofline says at this machine's level: seconds of one step, by query tokens."""
        logs = np.interp(np.asarray(query_tokens, np.float64), CENTRES, self._log_steps(batch, context))
        return np.exp(logs + self._level)

    def uncorrected_pass(self, recipe: Recipe, batch: int, context: float) -> float:
        """The same of one draft pass over `batch` requests."""
        return math.exp(float(np.interp(batch, CENTRES, self._log_passes(recipe, context))) + self._level)

    def pass_seconds(self, recipe: Recipe, batch: ArrayLike, context: float) -> NDArray[np.float64]:
        """Seconds of one draft pass, by batch size."""
        corrections = self._corrections(recipe).row(context_bucket(context))
        seconds = np.exp(self._log_passes(recipe, context) + corrections + self._level)
        return np.interp(np.asarray(batch, np.float64), CENTRES, seconds)

    def _corrections(self, recipe: Recipe) -> _Corrections:
        found = self._passes.get(recipe)
        if found is None:
            found = self._passes[recipe] = _Corrections(CONTEXTS)
        return found

    def _log_steps(self, batch: int, context: float) -> NDArray[np.float64]:
        key = batch, _eighth_octaves(context)
        logs = self._priors.get(key)
        if logs is None:
            seconds = self.roofline.seconds(batch, np.maximum(CENTRES, batch), 2.0 ** (key[1] / 8))
            logs = self._priors[key] = np.log(np.asarray(seconds))
        return logs

    def _log_passes(self, recipe: Recipe, context: float) -> NDArray[np.float64]:
        key = recipe, _eighth_octaves(context)
        logs = self._priors.get(key)
        if logs is None:
            seconds = self.roofline.pass_seconds(recipe, CENTRES, 2.0 ** (key[1] / 8))
            logs = self._priors[key] = np.log(np.asarray(seconds))
        return logs

    # -- on disk -------------------------------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write what was learnt of steps, replacing the file in one go."""
        delta, count = self._steps.delta, self._steps.count
        cells = [
            [int(row // CONTEXTS), int(row % CONTEXTS), int(i), round(float(delta[row, i]), 5), int(count[row, i])]
            for row, i in zip(*np.nonzero(count), strict=True)
        ]
        data = {"format": FORMAT, "for": self._identity(), "level": self._level, "cells": cells}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomically(path, data, durable=False)

    def load(self, path: Path) -> bool:
        """Take over what `save` wrote for the same model on the same hardware; anything else is left with a warning."""
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != FORMAT or data["for"] != self._identity():
                raise ValueError("it is of another model, other hardware or another version")
            level, cells = float(data["level"]), data["cells"]
            if not math.isfinite(level):
                raise ValueError("its level is no number")
            steps = _Corrections(ROWS)
            for batch, context, i, value, seen in cells:
                if not (0 <= batch < BATCHES and 0 <= context < CONTEXTS and 0 <= i < BUCKETS and abs(value) < 20):
                    raise ValueError("a cell is out of range")
                row = batch * CONTEXTS + context
                steps.delta[row, i], steps.count[row, i] = value, min(seen, 30)
        except FileNotFoundError:
            return False
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("freedraft: step times in %s are not used (%s); they are learnt anew", path, error)
            return False
        self._steps, self._level, self._seen = steps, level, 1
        return True

    def _identity(self) -> list[object]:
        shape, profile = self.roofline.shape, self.roofline.profile
        return [shape.hidden, shape.layers, shape.vocab, shape.dtype, shape.weight_bytes, shape.kv_bytes, profile.name,
                profile.peak_flops, profile.bandwidth, self.roofline.tensor_parallel]  # fmt: skip


class StepTimesFile:
    """Keeps step times from one start of an engine to the next. path: the file, which is read now; None keeps nothing.
    clock: seconds."""

    def __init__(self, times: StepTimes, path: Path | None, clock: Callable[[], float]) -> None:
        self._times, self._path, self._clock, self._saved = times, path, clock, clock()
        if path is not None:
            times.load(path)

    def save_if_due(self) -> None:
        """Write it once a minute."""
        if self._path is not None and self._clock() - self._saved > _SAVE_SECONDS:
            self._saved = self._clock()
            self.save()

    def save(self) -> None:
        """Write it; where that fails, say so and go on without."""
        if self._path is not None:
            try:
                self._times.save(self._path)
            except OSError as error:
                logger.warning("freedraft: cannot write step times to %s (%s); they are not kept", self._path, error)
                self._path = None
