"""Teaching `Acceptance` without an engine."""

from __future__ import annotations

from collections.abc import Sequence

from freedraft.cost.acceptance import Acceptance
from freedraft.draft import DraftBatch
from tests.support.steps import make_step


def observe(acceptance: Acceptance, draft: DraftBatch, continuations: Sequence[Sequence[int]]) -> None:
    """Learn from the tokens that followed each root of a draft."""
    step = make_step([str(row) for row in range(len(continuations))], continuations)
    acceptance.update(step)  # of the requests that are drafted for
    acceptance.follow(draft)
    acceptance.update(step)
