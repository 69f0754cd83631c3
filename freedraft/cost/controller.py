"""`Controller`: decides how much a step drafts; `Knee` (SSSD paper, section 3.2) and `FullLength`."""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from freedraft.cost.allocation import keep_likeliest
from freedraft.cost.hardware import HardwareProfile
from freedraft.cost.measured import Head, Measured
from freedraft.draft import DraftBatch
from freedraft.step import Step

Policy = Literal["auto", "knee", "fixed"]


def holding(nodes: NDArray[Any], widths: NDArray[np.int32]) -> NDArray[np.int32]:
    """The smallest width that holds each number of nodes, or the largest there is."""
    return widths[np.minimum(np.searchsorted(widths, nodes), len(widths) - 1)]


class Controller(ABC):
    """Decides how much is drafted, possibly nothing. Calls per step: `learn`, `plan`, then `cut` if something was
    drafted, `done`; `settle` once nothing waits for it, at the latest by the next `learn`.

    Args:
        max_draft_tokens: most draft tokens per request, roots not counted.
        widths: see `EngineContext`.
        measured: what is learnt for decisions; None if nothing is.
        head: of a drafter that ours are on top of, whose draft tokens are the least that is verified.

    Attributes:
        budget: draft tokens allowed in the last step, over the whole batch.
        chosen: bool [B], by `plan`: requests to draft for; None for all.
        speedup: estimated tokens per second over plain decoding; NaN without an estimate.
    """

    speedup = math.nan

    def __init__(
        self, profile: HardwareProfile, max_draft_tokens: int, widths: Sequence[int] | None = None,
        measured: Measured | None = None, head: Head | None = None,
    ) -> None:  # fmt: skip
        self.profile, self.max_draft_tokens, self.measured, self.head = profile, max_draft_tokens, measured, head
        self.widths = None if widths is None else np.array(widths, np.int32)
        self.budget = 0
        self.chosen: NDArray[np.bool_] | None = None

    def max_tokens_per_request(self, batch_size: int) -> int:
        """By the profile's caps."""
        cap = self.profile.max_nodes(batch_size)
        return self.max_draft_tokens if cap is None else min(self.max_draft_tokens, cap - 1)

    def learn(self, step: Step) -> None:
        """Learn the time and accepted tokens of the last step."""
        if self.measured is not None:
            self.measured.learn(step)

    def rests(self) -> bool:
        """Whether the next step may be skipped: it drafts nothing and teaches nothing. Asked once per step."""
        return False

    @abstractmethod
    def plan(self, step: Step) -> int:
        """Draft tokens per request to request from the drafter; 0: do not draft. Where no request has capacity, they
        are only learnt from."""

    @abstractmethod
    def cut(self, draft: DraftBatch) -> None:
        """Shorten drafts (their counts, in place) to the nodes to verify, and remember them for `learn`. Their arrays
        must not change until then."""

    def done(self, step: Step) -> None:
        """The drafts of this step are decided; its time starts."""
        if self.measured is not None:
            self.measured.launch()

    def settle(self) -> None:
        """Do what may wait until the step that verifies these drafts is launched."""

    def warm_up(self) -> None:
        """Compile, or load from the cache, everything that a step calls."""
        if self.measured is not None:
            self.measured.warm_up()

    def interrupt(self) -> None:
        """Steps follow that this controller does not see."""
        if self.measured is not None:
            self.measured.interrupt()

    def save(self) -> None:
        """Save learnt state to its file, if one is configured."""
        if self.measured is not None:
            self.measured.times.save()

    def _fitting(self, draft_len: int) -> int:
        if self.widths is None:
            return max(0, draft_len)
        fitting = int(np.searchsorted(self.widths, draft_len + 1, side="right"))
        return int(self.widths[fitting - 1]) - 1 if fitting else 0


class DrafterDecides(Controller):
    """The drafter decides how much; this only measures."""

    measured: Measured

    def plan(self, step: Step) -> int:
        return min(self.max_draft_tokens, step.most)

    def cut(self, draft: DraftBatch) -> None:
        self.measured.acceptance.follow(draft)
        self.budget = draft.draft_tokens


class FullLength(Controller):
    """Every request always drafts `max_draft_tokens`, or its maximum if that is less."""

    def plan(self, step: Step) -> int:
        return self._draft_len(step, self.max_draft_tokens, step.batch_size * self.max_draft_tokens)

    def _draft_len(self, step: Step, most: int, free: int) -> int:
        """most: draft tokens per request; free: of the whole batch, where requests may differ."""
        draft_len = self._fitting(min(most, step.most))
        self.budget = max(0, min(free, step.batch_size * draft_len))
        return draft_len if self.budget else 0

    def cut(self, draft: DraftBatch) -> None:
        if self.widths is None and draft.batch_size * self.max_draft_tokens > self.budget < draft.draft_tokens:
            keep_likeliest(draft.scores, draft.counts, self.budget)

    def warm_up(self) -> None:
        (draft := DraftBatch.roots(np.zeros(1, np.int32))).limit(draft.counts, draft.counts > 0)
        keep_likeliest(draft.scores, draft.counts, self.budget)


class Knee(FullLength):
    """The query tokens of a step, over the whole batch, stay at the ridge of the roofline, where they cost about as
    much as one: b * s_q = I_knee (paper, section 3.2), with caps for small batches."""

    def __init__(
        self, profile: HardwareProfile, max_draft_tokens: int, widths: Sequence[int] | None = None,
        knee: int | None = None,
    ) -> None:  # fmt: skip
        super().__init__(profile, max_draft_tokens, widths)
        self.knee = profile.ridge if knee is None else knee

    def length(self, batch_size: int) -> int:
        """Draft tokens per request, the same for all: s_q = I_knee / b nodes of the paper, capped, without the root."""
        nodes = max(1, round(self.knee / max(1, batch_size)))
        return min(self.max_tokens_per_request(batch_size), nodes - 1)

    def plan(self, step: Step) -> int:
        batch = step.batch_size
        if self.widths is not None:  # one width for all: the largest below the knee
            return self._draft_len(step, self.length(batch), batch * self.max_draft_tokens)
        return self._draft_len(step, self.max_tokens_per_request(batch), self.knee - batch)
