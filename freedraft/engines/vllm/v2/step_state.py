"""`V2StepState`: what draft passes ask of a step in vLLM's model runner V2."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freedraft.engines.vllm.pages import Pages


class V2StepState(NamedTuple):
    """See `StepState`. block_tables: vLLM's BlockTables; states: its RequestState; slots: intp [B], of the step's
    requests."""

    block_tables: Any
    states: Any
    slots: NDArray[np.intp]

    def pages(self) -> Pages:
        tables = self.block_tables
        blocks = tables.num_blocks.np[0, self.slots].astype(np.int64)
        return Pages(tables.block_tables[0].gpu, self.slots, blocks, tables.block_sizes[0])

    def prompt_lengths(self) -> NDArray[Any]:
        lengths: NDArray[Any] = self.states.prompt_len.np[self.slots]
        return lengths
