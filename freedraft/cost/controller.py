"""`Auto`: the draft tokens that maximise expected tokens per second over the batch, step by step.

For every node that the drafter offers, `Acceptance` says how likely it is to be accepted; for every number of query
tokens, `StepTimes` says how long the step would take. Taking the n likeliest nodes of the batch, a step yields
b + p_1 + ... + p_n tokens in t(b + n) seconds; the n of the best ratio is verified, and 0 is one of them (the tokens
per time of KnapSpec, over a batch).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from freedraft.config import ConfigError
from freedraft.cost.acceptance import Acceptance
from freedraft.cost.allocation import FREE, allocate_best, allocate_width
from freedraft.cost.batch_lengths import BatchLengths
from freedraft.cost.hardware import HardwareProfile, choose_profile
from freedraft.cost.model_shape import ModelShape
from freedraft.cost.overrun import Overrun
from freedraft.cost.policies import Controller, Fixed, Knee, Policy
from freedraft.cost.probes import ProbeSchedule
from freedraft.cost.roofline import Roofline
from freedraft.cost.step_times import CENTRES, MAX_QUERY_TOKENS, StepTimes, StepTimesFile, row_of
from freedraft.draft import DraftBatch
from freedraft.draft_pass import Recipe

if TYPE_CHECKING:
    from freedraft.step import EngineContext, Step

logger = logging.getLogger(__name__)

PROBE_EVERY = 100  # steps between probes: other numbers of tokens than the best known keep step times fresh
_PROBE_FIRST, _PROBE_GROWTH = 8, 1.125  # at a batch size that is new, unless nothing seems to pay there
_PROBE_COST = 1.5  # steps without drafts, at most, as far as is known
_IDLE_SHARE = 0.005  # of time, for drafting while nothing is verified
_MAX_IDLE = 256
_GAIN_RATE = 0.1
_ENOUGH = 3  # times of steps without drafts, from which on drafting can be compared with them


class Auto(Controller):
    """Policy "auto". roofline: where step times start from; the other arguments: see `Controller`; clock: seconds."""

    def __init__(
        self,
        roofline: Roofline,
        max_draft_tokens: int,
        widths: Sequence[int] | None = None,
        *,
        path: Path | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        super().__init__(roofline.profile, max_draft_tokens, widths)
        self.times = StepTimes(roofline)
        self.acceptance = Acceptance()
        self.gain = 0.0
        self.drafting_seconds = 0.0
        self._clock = clock
        self._file = StepTimesFile(self.times, path, clock)
        self._ended: float | None = None
        self._began = self._step_began = 0.0
        self._overrun = Overrun()
        self._passes = 0.0  # seconds that those of this step were to take
        self._context = 1.0
        self._probes = ProbeSchedule(_PROBE_FIRST, PROBE_EVERY, _PROBE_GROWTH)
        self._idle_left = 0
        self._longest = float(max_draft_tokens)
        self._random = np.random.default_rng(0)
        self._p, self._order = np.zeros((0, 0)), np.zeros(0)
        self._drafts_pay = False

    @property
    def min_score(self) -> float:
        return 0.0

    # -- one step ------------------------------------------------------------------------------------------------------

    def update(self, step: Step) -> None:
        now = self._began = self._clock()
        if step.previous is not None and self._ended is not None:
            predicted = self._passes + float(self.times.seconds(*step.previous, self._context))
            self._overrun.update(self._passes > 0.0, predicted, now - self._step_began)
            self.times.update(*step.previous, self._context, now - self._ended)
        self._step_began, self._passes = now, 0.0
        if step.batch_size:
            self._context = float(np.add.reduce(step.contexts, dtype=np.float64)) / step.batch_size
        self.acceptance.update(step)

    def max_draft_len(self, step: Step) -> int:
        batch = step.batch_size
        self.budget = 0
        if batch == 0:
            return 0
        if self._idle_left > 0:
            self._idle_left -= 1
            self.speedup = 1.0
            return 0
        draft_len = min(self.max_tokens_per_request(batch), int(step.capacities.max()), int(2.0 * self._longest) + 2)
        return self._fitting(min(draft_len, MAX_QUERY_TOKENS // batch - 1))

    def truncate(self, draft: DraftBatch, *unverified: DraftBatch) -> int:
        """See `Controller`. The arrays of `draft` and `unverified` must stay as they are until the next `update`.
        unverified: drafts of the same requests that are not verified, and still say something of acceptance."""
        batch = draft.batch_size
        if self._p.shape[0] < batch or self._p.shape[1] < draft.max_nodes:
            self._p = np.empty((max(batch, 2 * self._p.shape[0]), draft.max_nodes))
            self._order = np.empty(self._p.size)
        p = self._p[:batch, : draft.max_nodes]
        self.acceptance.calibrate(draft, p)
        self.follow(draft, *unverified)
        table = self.table(batch)
        forced = self._probe(batch, draft.max_nodes - 1, table)
        if self.widths is None:
            chosen, gain, longest = allocate_best(p, draft.counts, table, self.drafting_seconds, forced, self._order)
            self.budget = chosen
        else:
            chosen, gain, longest = allocate_width(p, draft.counts, table, self.drafting_seconds, self.widths, forced)
            self.budget = batch * (max(chosen, 1) - 1)
        if forced == FREE:
            self.gain += _GAIN_RATE * (gain - self.gain)
        self._drafts_pay = self.budget > 0
        self.speedup = 1.0 + self.gain if self._drafts_pay else 1.0
        self._longest = max(longest - 1.0, 0.97 * self._longest)
        return chosen

    def follow(self, *drafts: DraftBatch) -> None:
        self.acceptance.follow(*drafts)

    def end(self, step: Step) -> None:
        now, batch = self._clock(), step.batch_size
        if self.acceptance.follows:
            spent = now - self._began
            if 0.0 < spent < 1.0:
                rate = 0.5 if self.drafting_seconds == 0.0 else 0.05
                self.drafting_seconds += rate * (min(spent, 4 * self.drafting_seconds or spent) - self.drafting_seconds)
            if self.gain < 0.0 and not self.acceptance.rises:
                idle = self.drafting_seconds / (_IDLE_SHARE * max(float(self.step_seconds(batch, batch)), 1e-6))
                self._idle_left = min(int(idle), _MAX_IDLE)
        self._ended = now
        self._file.save_if_due()

    def interrupt(self) -> None:
        self._ended = None
        self.acceptance.follow()

    def exclude(self, seconds: float) -> None:
        """Time since `update` that is not the drafter's own, and was decided upon by itself."""
        self._began += seconds

    def save(self) -> None:
        self._file.save()

    # -- what steps and draft passes take, at the context of the present step ------------------------------------------

    def baseline_known(self, batch: int) -> bool:
        """Whether steps without drafts were timed often enough to compare anything with them."""
        tokens = batch if self.widths is None else batch * int(self.widths[0])
        return self.times.count(batch, tokens, self._context) >= _ENOUGH

    def table(self, batch: int) -> NDArray[np.float64]:
        """float64 [BUCKETS]: seconds of a step of `batch` requests at each number of query tokens in `CENTRES`."""
        return self.times.table(batch, self._context)

    def step_seconds(self, batch: int, query_tokens: ArrayLike) -> NDArray[np.float64]:
        """Seconds of a step of the whole model, by query tokens over the batch."""
        return self.times.seconds(batch, query_tokens, self._context)

    def pass_seconds(self, recipe: Recipe, batch: ArrayLike) -> NDArray[np.float64]:
        """Seconds of a draft pass, by number of requests."""
        return self.times.pass_seconds(recipe, batch, self._context)

    @property
    def overrun(self) -> float:
        """By how much a step with draft passes takes longer than its parts; see `Overrun`."""
        return self._overrun.factor

    def predicted_pass_seconds(self, recipe: Recipe, batch: int) -> float:
        """What the roofline says of a draft pass at this machine's level, whatever such passes took."""
        return self.times.uncorrected_pass(recipe, batch, self._context)

    def record_pass(self, recipe: Recipe, batch: int, seconds: float, count: int = 1) -> None:
        """So many draft passes over `batch` requests have taken so long each."""
        self._passes += count * float(self.times.pass_seconds(recipe, batch, self._context))
        self.times.update_pass(recipe, batch, self._context, seconds)

    def estimate(self, draft: DraftBatch) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
        """What `truncate` would make of a draft, which stays as it is. Returns float64 [B, N], the estimated
        probability of each draft node, 0 for everything else; int32 [B], nodes that would be kept, roots included."""
        p = self.acceptance.probabilities(draft)
        counts = draft.counts.copy()
        table = self.table(draft.batch_size)
        if self.widths is None:
            allocate_best(p, counts, table, 0.0, FREE, np.empty(p.size))
        else:
            allocate_width(p, counts, table, 0.0, self.widths, FREE)
        nodes = np.arange(draft.max_nodes)
        return np.where((nodes > 0) & (nodes < draft.counts[:, None]), p, 0.0), counts

    def _probe(self, batch: int, longest: int, table: NDArray[np.float64]) -> int:
        """Now and then, a number of tokens (an index of widths) at random: what is never tried is never known. None
        that is known to take much longer than a step without drafts."""
        if longest < 1 or not self._probes.due(row_of(batch, self._context), eager=self._drafts_pay):
            return FREE
        baseline = np.interp(batch, CENTRES, table)
        affordable = int(CENTRES[table <= _PROBE_COST * baseline].max(initial=batch))
        if self.widths is not None:
            widths = int(np.searchsorted(self.widths, affordable // batch, side="right"))
            return int(self._random.integers(max(1, widths)))
        octaves = math.log2(max(1, min(affordable - batch, batch * longest)))
        return int(2 ** (self._random.random() * (octaves + 1)) - 1)

    def warm_up(self) -> None:
        self.acceptance.warm_up()
        other = StepTimes(self.times.roofline)
        other.update(1, 1, 1.0, 1.0)
        p, counts = np.ones((1, 2)), np.full(1, 2, np.int32)
        if self.widths is None:
            allocate_best(p, counts, other.table(1, 1.0), 0.0, FREE, np.zeros(2))
        else:
            allocate_width(p, counts, other.table(1, 1.0), 0.0, self.widths, FREE)


def roofline_of(context: EngineContext, profile: HardwareProfile) -> Roofline:
    """The roofline of an engine's model. Raises ConfigError: its configuration cannot be read."""
    if context.hf_config is None:
        raise ConfigError("the model's configuration is not known")
    shape = ModelShape.from_config(context.hf_config.to_dict(), dtype=context.dtype, kv_dtype=context.kv_dtype)
    return Roofline(shape, profile, context.tensor_parallel, mask=context.widths is not None)


def knee_of(context: EngineContext, profile: HardwareProfile) -> int | None:
    """Query tokens per step at the ridge with the weights that the engine reads; None where its model is not known."""
    if context.hf_config is None or profile.knee is not None:
        return None
    try:
        return profile.ridge_of(roofline_of(context, profile).shape.weight_bytes)
    except ConfigError:
        return None


def make_controller(
    context: EngineContext,
    policy: Policy = "auto",
    *,
    hardware: str = "auto",
    knee: int | None = None,
    step_times: Path | None = None,
) -> Controller:
    """The controller of a policy, for an engine. Where the model's configuration cannot be read, "knee" decides instead
    of "auto", with one warning.

    Args:
        hardware: name or file of a profile, or "auto".
        knee: of policy "knee"; replaces the profile's ridge.
        step_times: of policy "auto": file to keep the step times in.

    Raises:
        ConfigError: `hardware` names no usable profile.
    """
    controller = _controller(context, policy, choose_profile(hardware, context.device), knee, step_times)
    controller.warm_up()
    return controller


def _controller(
    context: EngineContext, policy: Policy, profile: HardwareProfile, knee: int | None, step_times: Path | None
) -> Controller:
    max_draft_tokens, widths = context.max_draft_tokens, context.widths
    if policy == "fixed" or (context.lengths is not None and (policy != "auto" or len(context.lengths) == 1)):
        return Fixed(profile, max_draft_tokens, widths)
    if policy == "auto":
        try:
            roofline = roofline_of(context, profile)
            if context.lengths is not None:
                return BatchLengths(roofline, context.lengths, path=step_times)
            return Auto(roofline, max_draft_tokens, widths, path=step_times)
        except ConfigError as error:
            logger.warning("freedraft: %s: policy 'knee' decides instead of 'auto'", error)
    return Knee(profile, max_draft_tokens, widths, knee or knee_of(context, profile))
