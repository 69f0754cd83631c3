"""`GuardedMethod`: wraps a method for the engines' adapters. Its exceptions cost drafts, never tokens."""

from __future__ import annotations

import atexit
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from freedraft.draft import DraftBatch
from freedraft.method import Method, MethodSpec
from freedraft.report import Report
from freedraft.step import EngineContext, NodeLogits, Step
from freedraft.tenants import opted_out

if TYPE_CHECKING:
    from torch import Tensor

    from freedraft.draft_model import DraftModel

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
    """Wraps a method: counts and times its calls, and turns exceptions (all but `EngineMustEnd` and device faults) into
    a pause.

    Requests are added and finished during a pause, too, so that no state is lost or leaked.

    Attributes:
        running: ids of the requests that the method drafts for.
        in_prompt: of those in prefill, if the method needs prompt states.
    """

    def __init__(self, spec: MethodSpec, options: Any, context: EngineContext) -> None:
        self.method: Method = spec.make(options, context)
        self.method.controller.warm_up()
        self.metrics, self._report = self.method.metrics, Report(spec.name)
        self.running, self.in_prompt, self._opted_out = set[str](), set[str](), set[str]()
        self._paused = 0
        self._next_pause = FIRST_PAUSE
        self._good_steps = 0
        self._uncounted: tuple[Step, DraftBatch, float] | None = None
        self._rested: list[tuple[Sequence[str], NDArray[np.int32], NDArray[Any]]] = []  # see `rest`
        atexit.register(self.close)  # engines do not notify drafters of their shutdown

    def begin(
        self, request_id: str, tokens: NDArray[np.int32], tenant: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        """Add a request at its first step, or again after a preemption; see `Method.begin`."""
        self._catch_up()
        self.running.add(request_id)
        self.metrics.requests.set(len(self.running))
        (self._opted_out.add if opted_out(extra) else self._opted_out.discard)(request_id)
        self.call(self.method.begin, request_id, tokens, tenant, extra or {})
        if self.method.needs_prompt_states:
            self.in_prompt.add(request_id)

    def set_prompt_states(self, request_ids: Iterable[str], states: Tensor) -> None:
        """float [n, H], the last hidden states of the prompts of n requests that have just finished prefill."""
        for request_id, state in zip(request_ids, states.float().cpu().numpy(), strict=True):
            self.in_prompt.discard(request_id)
            self.call(self.method.set_prompt_state, request_id, state)

    @property
    def needs_logits(self) -> bool:
        """See `Method.needs_logits`; not during a pause, nor in steps without the method."""
        return self._paused == 0 and not self._rested and self.method.needs_logits

    def recycle(self, logits: NodeLogits) -> None:
        self.call(self.method.recycle, logits)

    def prepare(self, model: DraftModel) -> None:
        self.call(self.method.prepare, model)

    def rests(self) -> bool:
        """See `Method.rests`; the adapter then calls `rest` in place of `draft`."""
        return self._paused == 0 and bool(self.call(self.method.rests))

    def rest(self, request_ids: Sequence[str], tokens: NDArray[np.int32], contexts: NDArray[Any]) -> None:
        """Take a step later, together with others: each request gained one token. tokens, contexts: int [B], see
        `Step`."""
        self._rested.append((request_ids, tokens, contexts))

    def _catch_up(self) -> None:
        """Take the steps that `rest` kept, all as one step. A request occurs in it once for each of them."""
        if self._rested:
            (ids, tokens, contexts), self._rested = zip(*self._rested, strict=True), []
            request_ids = [request_id for of_step in ids for request_id in of_step]
            at, none = np.arange(len(request_ids)), np.zeros(len(request_ids), np.int32)
            step = Step(
                request_ids, np.concatenate(tokens), at, at + 1, np.concatenate(contexts).astype(np.int32), none, none,
                previous=None, history=lambda _: none[:0],  # a later step has it
                trees=none.astype(np.bool_),
            )  # fmt: skip
            self._take(step, self.method.update, "cost")

    def draft(self, step: Step, *, count: bool = True) -> DraftBatch | None:
        """See `Method.draft`; None after a failure and during a pause. count: whether to count the step now; otherwise
        the caller calls `count` when nothing waits for it."""
        self._catch_up()
        if self._paused > 0:
            self._paused -= 1
            self._count_failed(step)
            return None
        started = time.perf_counter()
        draft: DraftBatch | None = self.call(self.method.draft, step)
        if draft is None:
            self._count_failed(step)
            return None
        self._good_steps += 1
        if self._good_steps == FORGIVEN:
            self._next_pause = FIRST_PAUSE
        self._uncounted = step, draft, time.perf_counter() - started
        if count:
            self.count()
        return draft

    def count(self) -> None:
        """Count the step that was drafted for."""
        if self._uncounted is not None:
            (step, draft, seconds), self._uncounted = self._uncounted, None
            self.metrics.budget.set(self.method.controller.budget)
            self.metrics.seconds.observe(seconds)
            self.call(self.method.controller.settle)
            self.call(self._count, step)
            self.call(self._count_reasons, step, draft)

    def observe(self, step: Step, reason: str = "cost") -> None:
        """Learn from a step after which, for a reason of the metrics, nothing is verified. What the method drafts is
        dropped."""
        self._catch_up()
        self._take(step, self.method.draft, reason)
        self.metrics.budget.set(0)

    def _take(self, step: Step, action: Callable[[Step], Any], reason: str) -> None:
        if not (paused := self._paused > 0):
            self.call(action, step)
        if self._paused > 0:  # a failure begins a pause
            self._paused -= paused
            self._count_failed(step)
        else:
            self.call(self.method.controller.settle)
            self.call(self._count, step)
            self._count_undrafted(step, reason)

    def _count_failed(self, step: Step) -> None:
        self.metrics.add(step)
        self._count_undrafted(step, "failure")

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

    def _count(self, step: Step) -> None:
        self.method.record_acceptance(step)
        self.metrics.speedup.set(self.method.controller.speedup)
        self._report.add(step, self.method.controller.speedup)

    def finish(self, request_id: str, output: NDArray[np.int32] | None = None) -> None:
        self._catch_up()
        self.running.discard(request_id)
        self.in_prompt.discard(request_id)
        self._opted_out.discard(request_id)
        self.metrics.requests.set(len(self.running))
        self.call(self.method.finish, request_id, output)

    def output_of(self, work: Callable[..., NDArray[np.int32]], *arguments: Any) -> NDArray[np.int32]:
        """An output for `finish`; empty, so that nothing is learnt, if `work` fails."""
        output: NDArray[np.int32] | None = self.call(work, *arguments)
        return np.zeros(0, np.int32) if output is None else output

    def close(self) -> None:
        atexit.unregister(self.close)
        self.call(self.method.close)

    def call(self, work: Callable[..., Any], *arguments: Any) -> Any:
        """The result of `work`, None if it raises anything but a device fault; adapters also guard their own drafting
        code with it."""
        try:
            return work(*arguments)
        except Exception as error:
            if is_device_fault(error):
                raise
            self.metrics.failures.inc()
            if self._paused == 0:
                self._paused = self._next_pause
                self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
                self._good_steps = 0
                self.method.controller.interrupt()
                logger.exception(
                    "freedraft: drafting failed. Answers are not affected; %d steps have no drafts. Please report this",
                    self._paused,
                )
            return None
