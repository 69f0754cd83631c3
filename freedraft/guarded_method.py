"""`GuardedMethod`: wraps a method for the engines' adapters. Its exceptions cost drafts, never tokens."""

from __future__ import annotations

import atexit
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from freedraft.draft import DraftBatch
from freedraft.method import Method, MethodSpec
from freedraft.metrics import serve
from freedraft.report import Report
from freedraft.step import EngineContext, Step
from freedraft.tenants import opted_out

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

# Steps without drafts after a failure: the first pause, and the limit of its doubling.
FIRST_PAUSE, LONGEST_PAUSE = 16, 4096
FORGIVEN = 1024  # steps without a failure that reset the pause

# Torch's exception classes for device, driver and NCCL errors; and texts of Triton's errors, which have no class, for
# faults after which every later call to the device fails.
_FAULTS = {"AcceleratorError", "CudaError", "DistBackendError"}
_PASSING = ("out of memory", "captur")  # texts of errors that leave the device usable
_LASTING = (
    "illegal memory access", "illegal instruction", "misaligned address", "device-side assert", "launch failure"
)  # fmt: skip


def is_device_fault(error: Exception) -> bool:
    """Whether a device has failed, so that no later step can succeed and the engine must handle it."""
    named = not _FAULTS.isdisjoint(kind.__name__ for kind in type(error).__mro__)
    named = named and not any(words in str(error) for words in _PASSING)
    return named or (isinstance(error, RuntimeError) and any(words in str(error) for words in _LASTING))


class EngineMustEnd(BaseException):
    """Raised where continuing could give wrong tokens or deadlock ranks. `except Exception` does not catch it, so the
    process ends, and the engine's supervision ends the others."""


class GuardedMethod:
    """Wraps a method: counts and times its steps, and turns exceptions (all but `EngineMustEnd` and device faults) into
    a pause. As a context manager it does the latter for an adapter's own code.

    Requests are added and finished during a pause, too, so that no state is lost or leaked.

    Attributes:
        running: ids of the requests that the method drafts for.
        in_prompt: of those in prefill, if the method needs prompt states.
        paused: steps for which the method is left alone after a failure.
    """

    def __init__(self, spec: MethodSpec, options: Any, context: EngineContext) -> None:
        serve(options.metrics_port, context.rank, options.metrics_host)
        self.method: Method = spec.make(options, context)
        self.method.controller.warm_up()
        name, _, inner = spec.name.partition("+")
        self._below = context.below or inner  # the drafter that ours are on top of
        self.metrics, self._report = self.method.metrics, Report(name, self._below, alone=context.head > 0)
        self.running, self.in_prompt, self._opted_out = set[str](), set[str](), set[str]()
        self.paused = 0
        self._next_pause = FIRST_PAUSE
        self._good_steps = 0
        self._unsettled: tuple[Step, DraftBatch | None, float, str] | None = None  # the newest step, until `settle`
        self._kept: list[tuple[Sequence[str], NDArray[np.int32], NDArray[Any]]] = []  # see `keep`
        atexit.register(self.close)  # engines do not notify drafters of their shutdown

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if not isinstance(error, Exception) or is_device_fault(error):
            return False
        self.metrics.failures.inc()
        if self.paused == 0:
            self.paused = self._next_pause
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
            self._good_steps = 0
            self.method.controller.interrupt()
            logger.error(
                "freedraft: drafting failed. Answers are not affected; %d steps have no drafts. Please report this",
                self.paused, exc_info=error,
            )  # fmt: skip
        return True

    # -- requests ------------------------------------------------------------------------------------------------------

    def begin(
        self, request_id: str, tokens: NDArray[np.int32], tenant: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Add a request at its first step, or again after a preemption; see `Method.begin`."""
        self._take_kept()
        self.running.add(request_id)
        self.metrics.requests.set(len(self.running))
        (self._opted_out.add if opted_out(extra) else self._opted_out.discard)(request_id)
        with self:
            self.method.begin(request_id, tokens, tenant, extra or {})
        if self.method.needs_prompt_states:
            self.in_prompt.add(request_id)

    def set_prompt_states(self, request_ids: Iterable[str], states: Tensor) -> None:
        """float [n, H], the last hidden states of the prompts of n requests that have just finished prefill."""
        for request_id, state in zip(request_ids, states.float().cpu().numpy(), strict=True):
            self.in_prompt.discard(request_id)
            with self:
                self.method.set_prompt_state(request_id, state)

    def finish(self, request_id: str, output: Callable[[], NDArray[np.int32]] | None = None) -> None:
        """Remove a request; see `Method.finish`. output: makes its output; if that fails, nothing is learnt."""
        self._take_kept()
        self.running.discard(request_id)
        self.in_prompt.discard(request_id)
        self._opted_out.discard(request_id)
        self.metrics.requests.set(len(self.running))
        tokens = None if output is None else np.zeros(0, np.int32)
        with self:
            tokens = tokens if output is None else output()
        with self:
            self.method.finish(request_id, tokens)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(self, step: Step, undrafted: str = "") -> DraftBatch | None:
        """Tell the method of a step, and return its drafts; None after a failure and during a pause. The caller calls
        `settle` when nothing waits for it.

        Args:
            undrafted: why nothing is verified after this step, a reason of the metrics; what is drafted is dropped.
        """
        self._take_kept()
        draft = self._do(self.method.draft, step, undrafted)
        return None if undrafted else draft

    def _do(self, action: Callable[[Step], DraftBatch], step: Step, undrafted: str) -> DraftBatch | None:
        self.settle()
        started, draft = time.perf_counter(), None
        if self.paused > 0:
            self.paused -= 1
        else:
            with self:
                draft = action(step)
                self._good_steps += 1
                if self._good_steps == FORGIVEN:
                    self._next_pause = FIRST_PAUSE
        self._unsettled = step, draft, time.perf_counter() - started, undrafted
        return draft

    def rests(self) -> bool:
        """See `Method.rests`; the adapter then calls `keep` in place of `step`."""
        if self.paused == 0:
            with self:
                return self.method.rests()
        return False

    def keep(self, request_ids: Sequence[str], tokens: NDArray[np.int32], contexts: NDArray[Any]) -> None:
        """Keep a step in which each request gained one token; the method gets it with its next call. tokens, contexts:
        int [B], see `Step`."""
        self._kept.append((request_ids, tokens, contexts))

    def _take_kept(self) -> None:
        """Give the method the steps that were kept, as one step. A request occurs in it once for each of them."""
        if self._kept:
            (ids, tokens, contexts), self._kept = zip(*self._kept, strict=True), []
            request_ids = [request_id for of_step in ids for request_id in of_step]
            at, none = np.arange(len(request_ids)), np.zeros(len(request_ids), np.int32)
            step = Step(
                request_ids, np.concatenate(tokens), at, at + 1, np.concatenate(contexts).astype(np.int32), none, none,
                previous=None, history=lambda _: none[:0],  # a later step has it
                trees=none.astype(np.bool_),
            )  # fmt: skip
            self._do(self._update, step, "cost")
            self.settle()

    def _update(self, step: Step) -> DraftBatch:
        self.method.update(step)
        return DraftBatch.roots(step.roots)

    @property
    def needs_logits(self) -> bool:
        """See `Method.needs_logits`; not during a pause, nor in steps without the method."""
        return self.paused == 0 and not self._kept and self.method.needs_logits

    def settle(self) -> None:
        """Count the newest step, and let the controller learn."""
        if self._unsettled is None:
            return
        (step, draft, seconds, undrafted), self._unsettled = self._unsettled, None
        controller = self.method.controller
        if draft is None:
            self.metrics.add(step)
            self._report.add(step, math.nan)
            self._count_undrafted(step, "failure")
            return
        self.metrics.budget.set(0 if undrafted else controller.budget)
        with self:
            controller.settle()
        with self:
            own, below = self.method.split(step)
            self.method.record_acceptance(own)
            self.metrics.speedup.set(controller.speedup)
            self._report.add(own, controller.speedup)
            if below is not None:
                self.count_head(below)
        if undrafted:
            self._count_undrafted(step, undrafted)
        else:
            self.metrics.seconds.observe(seconds)
            with self:
                self._count_reasons(step, draft)

    def judge_head(
        self, gained: Sequence[NDArray[Any]], ngrams: NDArray[Any], drafted: NDArray[np.int32], known: NDArray[np.bool_]
    ) -> None:
        """Count what a step accepted of the K tokens of the drafter that ours are on top of. n-grams were verified
        where they had all of these and more, and all were right: else the others were, or the host does not know.

        Args:
            gained: `tokens`, `starts` and `ends` as in `Step`; known: bool [B], where the K tokens were verified.
            ngrams: int [B, K], the first tokens of n-grams; drafted: int32 [B], number of all, 0 from now on where
                they were not verified.
        """
        (tokens, starts, ends), k = gained, ngrams.shape[1]
        count = ends - starts
        new = tokens[np.minimum(starts[:, None] + np.arange(k), len(tokens) - 1)]
        drafted[(new != ngrams).any(1) | (count <= k) | (drafted <= k)] = 0
        self.count_head(np.minimum(count - 1, k)[known])

    def count_head(self, accepted: NDArray[np.int64]) -> None:
        """Count accepted tokens of the drafter that ours are on top of, [B], of each of its drafts; and learn them."""
        if (head := self.method.controller.head) is not None and len(accepted):
            head.learn(float(accepted.mean()))
        for length, drafts in Counter(accepted.tolist()).items():
            self.metrics.head_lengths(self._below, str(length)).inc(drafts)
        self._report.add_head(accepted)

    def _count_reasons(self, step: Step, draft: DraftBatch) -> None:
        undrafted = draft.counts <= 1
        if not undrafted.any():
            return
        full, unmatched = step.capacities == 0, self.method.unmatched
        for reason, rows in (("no room", full), ("no match", ~full & unmatched), ("cost", ~(full | unmatched))):
            self._count_undrafted(step, reason, undrafted & rows)

    def _count_undrafted(self, step: Step, reason: str, rows: NDArray[np.bool_] | bool = True) -> None:
        """Count requests without a draft (rows: bool [B], or all): for `reason`, unless their clients want none."""
        if self._opted_out:
            out = np.array([request_id in self._opted_out for request_id in step.request_ids], np.bool_)
            self.metrics.undrafted("off").inc(np.count_nonzero(out & rows))
            rows = ~out & rows
        self.metrics.undrafted(reason).inc(step.batch_size if rows is True else np.count_nonzero(rows))

    def close(self) -> None:
        atexit.unregister(self.close)
        with self:
            self.method.close()
