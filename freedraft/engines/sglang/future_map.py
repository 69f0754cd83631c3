"""`EarlyFutureMap`: SGLang's relay between steps, with requests looked up before its wait, and one wait per step."""

from __future__ import annotations

from typing import Any

from sglang.srt.managers.overlap_utils import FutureMap


class EarlyFutureMap(FutureMap):
    """Under overlap scheduling, SGLang schedules a step while the previous one runs, then waits here for its lengths.
    On the drafting rank they come with the accepted tokens, by one copy and one wait; other ranks use SGLang's copy."""

    spec_algo: Any  # our `TreeAlgorithm`
    needs_cpu_seq_lens: bool

    def resolve_seq_lens_cpu(self, batch: Any, *args: Any, **kwargs: Any) -> None:
        drafted_for = batch.forward_mode.is_decode() and batch.reqs and self.spec_algo.receive_step is not None
        lengths = self.spec_algo.receive_step(batch) if drafted_for else None
        relayed = batch.spec_info is not None and batch.spec_info.future_indices is not None
        if lengths is None or not relayed or not self.needs_cpu_seq_lens:
            return super().resolve_seq_lens_cpu(batch, *args, **kwargs)
        self.needs_cpu_seq_lens = False
        try:
            super().resolve_seq_lens_cpu(batch, *args, **kwargs)
        finally:
            self.needs_cpu_seq_lens = True
        batch.seq_lens_cpu, batch.seq_lens_sum = lengths, int(lengths.sum())
