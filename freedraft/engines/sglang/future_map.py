"""`EarlyFutureMap`: SGLang's relay between steps, which lets drafting begin before the scheduler waits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.managers.overlap_utils import FutureMap

if TYPE_CHECKING:
    from freedraft.engines.sglang.algorithm import TreeAlgorithm


class EarlyFutureMap(FutureMap):
    """With overlap, SGLang decides on a step while the last one runs, and then waits here for the lengths of that."""

    algorithm: TreeAlgorithm

    def resolve_seq_lens_cpu(self, batch: Any, *args: Any, **kwargs: Any) -> None:
        if self.algorithm.prepare is not None and batch.forward_mode.is_decode() and batch.reqs:
            self.algorithm.prepare(batch)
        super().resolve_seq_lens_cpu(batch, *args, **kwargs)
