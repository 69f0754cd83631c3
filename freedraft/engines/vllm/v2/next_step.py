"""`NextStep`: the step that model runner V2 prepares; `Stage`: how far it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from freedraft.cost.auto_by_batch import Rows


class Stage(Enum):
    """The moments at which a step can get its drafts, in their order."""

    SAMPLED = "the step before is sampled: vLLM puts the drafts among the inputs itself"
    SLOTS = "KV slots are chosen: attention metadata are next"
    MODEL = "the model is launched next: nothing else reads the drafts"


@dataclass(eq=False)
class NextStep:
    """Made when the step before is sampled, replaced when it is sampled itself. B requests to be drafted for.

    Attributes:
        slots: intp [B]; most: draft tokens of each; alone: whether no other step waits for its tokens meanwhile, as in
            a pipeline.
        due: the stage at which it gets its drafts; None if it has them, or gets none.
        lengths: draft lengths by batch size, to send to the scheduler.
        batch: vLLM's InputBatch, from `Stage.SLOTS` on.
        kv_slots, positions: int64 [T] each, where it may verify trees: the KV slots of its tokens, and their positions
            in a chain while the batch has those by depth, or the reverse.
        has_trees: whether it verifies a tree.
        logits: float [R, V] and the InputBatch of their rows, once it has run; None if nobody needs them.
    """

    slots: NDArray[np.intp] = field(default_factory=lambda: np.zeros(0, np.intp))
    most: int = 0
    alone: bool = True
    due: Stage | None = None
    lengths: Rows = field(default_factory=list)
    batch: Any = None
    kv_slots: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    has_trees: bool = False
    logits: tuple[torch.Tensor, Any] | None = None

    @property
    def rows(self) -> slice | NDArray[np.intp]:
        """Its slots; if it is alone, the block of all slots from its first to its last."""
        return slice(int(self.slots.min()), int(self.slots.max()) + 1) if self.alone else self.slots
