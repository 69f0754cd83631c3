"""`Confidences`: acceptance probabilities of draft tokens, for vLLM's adaptive verification."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from freedraft.cost.acceptance import Acceptance
from freedraft.draft import DraftBatch
from freedraft.step import Step


class Confidences:
    """Probability that each draft token is accepted if its predecessors are; 0 for no token. B requests, K = most draft
    tokens of a request. device: float32 [slots, K], by row of the batch, read by vLLM; host: the same, pinned.
    """

    def __init__(self, slots: int, length: int, device: torch.device) -> None:
        self._acceptance = Acceptance()
        self.host = torch.zeros(slots, length, dtype=torch.float32, pin_memory=device.type != "cpu")
        self.device = torch.zeros(slots, length, dtype=torch.float32, device=device)

    def estimate(
        self, step: Step, draft: DraftBatch | None, rows: NDArray[np.intp], counts: NDArray[np.int32], batch: int
    ) -> None:
        """Write the probabilities of a draft, and learn from the previous one. draft: of R requests; None if drafting
        failed; rows: intp [R], the requests' rows of the batch; counts: int32 [R], draft tokens of each; batch: B."""
        host = self.host[:batch].numpy()
        host[:] = 0.0
        self._acceptance.update(step)
        if draft is not None:
            p = self._acceptance.probabilities(draft)[:, : 1 + host.shape[1]]
            given = (p[:, 1:] / np.maximum(p[:, :-1], 1e-9)).clip(0.0, 1.0)
            width = given.shape[1]
            host[rows, :width] = np.where(np.arange(width) < counts[:, None], given, 0.0)
            self._acceptance.follow(draft)

    def send(self, batch: int) -> None:
        """Start the copy to the device."""
        self.device[:batch].copy_(self.host[:batch], non_blocking=True)
