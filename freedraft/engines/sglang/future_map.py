"""`EarlyFutureMap`: SGLang's relay between steps, which lets drafting begin before the scheduler waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.overlap_utils import FutureMap


class EarlyFutureMap(FutureMap):
    """With overlap, SGLang decides on a step while the last one runs, and then waits here for the lengths of that."""

    prepare: Callable[[Any], None]

    def resolve_seq_lens_cpu(self, batch: Any, *args: Any, **kwargs: Any) -> None:
        if batch.forward_mode.is_decode() and batch.reqs:
            self.prepare(batch)
        super().resolve_seq_lens_cpu(batch, *args, **kwargs)
