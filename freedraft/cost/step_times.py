"""`StepTimes`: seconds of steps and draft passes: the roofline, corrected by times measured while serving."""

import json
import logging
import math
import time
from collections.abc import Callable, Hashable
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from freedraft.compiled import compiled
from freedraft.cost.roofline import Roofline
from freedraft.draft_model import Recipe
from freedraft.files import write_atomically

logger = logging.getLogger(__name__)

Floats = NDArray[np.float64]
FORMAT = "freedraft-step-times-2"
MAX_QUERY_TOKENS = 8192
# Query tokens at which times are kept, and between which they are interpolated: exact up to 16, then four per octave
CENTRES: Floats = np.array([*range(1, 16), *(round(16 * 2 ** (i / 4)) for i in range(37))], np.float64)
BUCKETS = len(CENTRES)
BATCHES = 10  # 1, 2, 3-4, 5-8, ..., 129-256, more
CONTEXTS = 10  # tokens per request: up to 512, 1 Ki, 2 Ki, ..., 128 Ki, more
_RATE = 0.01  # weight of a new time in a bucket with many
_SEEN_OFTEN = 8  # times of a bucket below which its neighbours count, too
_LEVEL_RATE = 0.08  # faster: a slower machine slows down all kinds of step
_SAVE_SECONDS = 60.0
_CLIP = 0.25  # ln: larger errors are clipped to this
_ABSURD = math.log(30.0)  # ln: times with larger errors are dropped
_PATIENCE = 20  # consecutive dropped times after which they are accepted


def _bucket(query_tokens: int) -> int:
    return int(np.searchsorted((CENTRES[1:] + CENTRES[:-1]) / 2, query_tokens, side="right"))


def context_bucket(context: float) -> int:
    return min((math.ceil(max(context, 1.0)) - 1).bit_length() - 9, CONTEXTS - 1) if context > 512 else 0


def row_of(batch: int, context: float) -> int:
    """Row of steps of this batch size and mean context: 0 .. BATCHES * CONTEXTS - 1."""
    return min((batch - 1).bit_length(), BATCHES - 1) * CONTEXTS + context_bucket(context)


@compiled
def _curve(delta, count):
    """float64 [BUCKETS]: corrections of a row, interpolated between buckets with times; those of few times are drawn
    towards their neighbours."""
    seen = np.flatnonzero(count)
    if len(seen) == 0:
        return np.zeros(len(delta))
    values = delta[seen]
    for i in range(len(seen) if len(seen) > 1 else 0):
        times = count[seen[i]]
        if times < _SEEN_OFTEN:
            before, after = (i - 1 if i > 0 else 1), (i + 1 if i + 1 < len(seen) else i - 1)
            near = (delta[seen[before]] + delta[seen[after]]) / 2
            values[i] = (times * values[i] + near) / (times + 1.0)
    return np.interp(np.arange(len(delta)), seen, values)


class _Corrections:
    """ln(measured / predicted), and number of times, by row (batch size, context) and bucket of query tokens."""

    def __init__(self, rows: int) -> None:
        self.delta, self.count = np.zeros((rows, BUCKETS)), np.zeros((rows, BUCKETS))
        self._curves: dict[int, Floats] = {}  # of rows since the newest time
        self._alike: dict[int, int] = {}  # since the newest bucket

    def learn(self, row: int, bucket: int, error: float) -> None:
        """error: ln(measured / predicted) of a time, without the common level."""
        seen, known = self.count[row, bucket], self.delta[row, bucket]
        if seen < _SEEN_OFTEN and error < known - 2 * _CLIP:  # the few before were slow, as the first of a kind is
            seen = self.count[row, bucket] = 0.0
        clip = _CLIP if seen >= 3 else math.inf if seen == 0 else 3 * _CLIP
        self.delta[row, bucket] += max(_RATE, 1.0 / (seen + 1.0)) * min(max(error - known, -clip), clip)
        self.count[row, bucket] += 1.0
        self._curves.clear()
        if not seen:
            self._alike.clear()

    def row(self, row: int) -> Floats:
        """float64 [BUCKETS]: the corrections of a row. A row without times of verification borrows the slope of the
        most similar row, so that it is not relearnt at every context."""
        found = self._curves.get(row)
        if found is None:
            if row not in self._alike:
                self._alike[row] = self._most_alike(row)
            alike = self._alike[row]
            slope = _curve(self.delta[alike], self.count[alike]) if alike >= 0 else np.zeros(BUCKETS)
            found = self._curves[row] = slope + _curve(self.delta[row] - slope, self.count[row])
        return found

    def _most_alike(self, row: int) -> int:
        """The nearest other row with a slope, else with any time; -1 for none."""
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

    The level follows the machine (its clock, its other load); the corrections, by buckets, are the errors of the
    roofline for a kind of step. Only ratios decide how much to draft, so the level does not matter. Outliers are
    clipped, absurd times dropped.

    Args:
        path: file that keeps step times between starts.
        clock: seconds.

    Attributes:
        seen: number of times learnt from.
    """

    def __init__(
        self, roofline: Roofline, path: Path | None = None, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.roofline, self.seen = roofline, 0
        self._steps = _Corrections(BATCHES * CONTEXTS)
        self._passes: dict[Recipe, _Corrections] = {}
        self._level, self._absurd = 0.0, 0
        self._warm: set[tuple[Recipe, int]] = set()
        self._predicted: dict[tuple[Hashable, int], Floats] = {}
        self._path, self._clock, self._saved = path, clock, clock()
        if path is not None:
            self._load(path)

    def count(self, batch: int, query_tokens: int, context: float) -> float:
        """Number of timed steps in this bucket."""
        return float(self._steps.count[row_of(batch, context), _bucket(query_tokens)])

    def update(self, batch: int, query_tokens: int, context: float, seconds: float) -> bool:
        """Learn from one step. Returns False if the time was dropped."""
        if not 1 <= batch <= query_tokens <= MAX_QUERY_TOKENS:
            return False
        return self._learn(self._steps, row_of(batch, context), query_tokens, self._log(batch, context), seconds)

    def update_pass(self, recipe: Recipe, batch: int, context: float, seconds: float) -> bool:
        """Learn from one draft pass over `batch` requests. The first one of its kind, which compiles and warms up, is
        dropped."""
        if not 1 <= batch <= MAX_QUERY_TOKENS:
            return False
        if (kind := (recipe, _bucket(batch))) not in self._warm:
            self._warm.add(kind)
            return False
        row, predicted = context_bucket(context), self._log(recipe, context)
        return self._learn(self._of_recipe(recipe), row, batch, predicted, seconds)

    def _learn(self, corrections: _Corrections, row: int, query_tokens: int, predicted: Floats, seconds: float) -> bool:
        if not (seconds > 0.0 and math.isfinite(seconds)):
            return False
        bucket = _bucket(query_tokens)
        error = math.log(seconds) - float(np.interp(query_tokens, CENTRES, predicted)) - self._level
        if self.seen == 0:
            self._level += error
            error = 0.0
        surprise = error - corrections.row(row)[bucket]
        if abs(surprise) > _ABSURD:
            self._absurd += 1
            if self._absurd < _PATIENCE:
                return False
            self._level += surprise  # a different machine, or wrong times before
            error, surprise = error - surprise, 0.0
        self._absurd = 0
        if corrections.count[row, bucket] >= 3:  # before, the error is the roofline's shape
            self._level += _LEVEL_RATE * min(max(surprise, -_CLIP), _CLIP)
        corrections.learn(row, bucket, error)
        self.seen += 1
        return True

    # -- predictions ---------------------------------------------------------------------------------------------------

    def seconds(self, batch: int, query_tokens: ArrayLike, context: float) -> Floats:
        logs = self._log(batch, context) + self._steps.row(row_of(batch, context)) + self._level
        return np.interp(np.asarray(query_tokens, np.float64), CENTRES, np.exp(logs))

    def uncorrected(self, batch: int, query_tokens: ArrayLike, context: float) -> Floats:
        """The same by the roofline alone, scaled to this machine."""
        logs = self._log(batch, context) + self._level
        return np.exp(np.interp(np.asarray(query_tokens, np.float64), CENTRES, logs))

    def pass_seconds(self, recipe: Recipe, batch: ArrayLike, context: float) -> Floats:
        corrections = self._of_recipe(recipe).row(context_bucket(context))
        seconds = np.exp(self._log(recipe, context) + corrections + self._level)
        return np.interp(np.asarray(batch, np.float64), CENTRES, seconds)

    def _of_recipe(self, recipe: Recipe) -> _Corrections:
        if recipe not in self._passes:
            self._passes[recipe] = _Corrections(CONTEXTS)
        return self._passes[recipe]

    def _log(self, kind: int | Recipe, context: float) -> Floats:
        """float64 [BUCKETS]: ln of the roofline's seconds of a step (kind: batch size) or of a pass (kind: recipe), at
        the nearest of eight contexts per octave."""
        key = kind, round(8.0 * math.log2(max(context, 64.0)))
        if key not in self._predicted:
            if len(self._predicted) == 4096:  # rather than a curve of every batch size and context
                self._predicted.clear()
            near = 2.0 ** (key[1] / 8)
            if isinstance(kind, int | np.integer):
                seconds = self.roofline.seconds(int(kind), np.maximum(CENTRES, kind), near)
            else:
                seconds = self.roofline.pass_seconds(kind, CENTRES, near)
            self._predicted[key] = np.log(np.asarray(seconds))
        return self._predicted[key]

    # -- on disk -------------------------------------------------------------------------------------------------------

    def save_if_due(self) -> None:
        if self._path is not None and self._clock() - self._saved > _SAVE_SECONDS:
            self._saved = self._clock()
            self.save()

    def save(self) -> None:
        if self._path is None:
            return
        delta, count = self._steps.delta, self._steps.count
        cells = [
            [int(row // CONTEXTS), int(row % CONTEXTS), int(i), round(float(delta[row, i]), 5), int(count[row, i])]
            for row, i in zip(*np.nonzero(count), strict=True)
        ]
        data = {"format": FORMAT, "for": self._identity(), "level": self._level, "cells": cells}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._path, json.dumps(data).encode(), mode=0o666, durable=False)
        except OSError as error:
            logger.warning("freedraft: cannot write step times to %s (%s); they are not kept", self._path, error)
            self._path = None

    def _load(self, path: Path) -> None:
        steps = _Corrections(BATCHES * CONTEXTS)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            if data["format"] != FORMAT or data["for"] != self._identity():
                raise ValueError("it is of another model, other hardware or another version")
            level, cells = float(data["level"]), data["cells"]
            if not math.isfinite(level):
                raise ValueError("its level is not a number")
            for batch, context, i, value, seen in cells:
                if not (0 <= batch < BATCHES and 0 <= context < CONTEXTS and 0 <= i < BUCKETS and abs(value) < 20):
                    raise ValueError("a cell is out of range")
                row = batch * CONTEXTS + context
                steps.delta[row, i], steps.count[row, i] = value, min(seen, 30)
        except FileNotFoundError:
            return
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("freedraft: step times in %s are not used (%s); they are learnt anew", path, error)
            return
        self._steps, self._level, self.seen = steps, level, 1

    def _identity(self) -> list[object]:
        shape, profile = self.roofline.shape, self.roofline.profile
        return [shape.hidden, shape.layers, shape.vocab, shape.dtype, shape.weight_bytes, shape.kv_bytes, profile.name,
                profile.peak_flops, profile.bandwidth, self.roofline.tensor_parallel]  # fmt: skip
