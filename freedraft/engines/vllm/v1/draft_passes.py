"""Draft passes over the engine's own paged KV cache: one query token per request, written into reserved slots only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from freedraft.engines.vllm.runner import Step

# What the KV kernels take for "write nothing".
NO_SLOT = -1


class DraftPasses:
    """Forward passes of one token per request, in vLLM's forward context.

    The past of a request is read from the pages that the target wrote. The pass for position p writes the KV of p,
    which lies past the computed tokens in a block of the same request; the target's next step writes all of these
    positions again before any pass reads them, and only computed tokens are ever prefix-cached.
    """

    def __init__(self, runner: Any, vllm_config: Any) -> None:
        """Raises ValueError when the KV cache of this engine is of several kinds."""
        from vllm.forward_context import create_forward_context

        groups = [group for groups in runner.attn_groups for group in groups]
        if len(runner.kv_cache_config.kv_cache_groups) != 1 or len(groups) != 1:
            raise ValueError("layer skipping needs one KV cache group and one kind of attention in all layers")
        self.runner = runner
        self.group = groups[0]
        self.device = runner.device
        self.max_model_len = runner.max_model_len
        self.context = create_forward_context(None, vllm_config)
        self.starts_cpu = torch.arange(runner.max_num_reqs + 1, dtype=torch.int32)
        self.starts = self.starts_cpu.to(self.device)
        self.not_prefilling = torch.zeros(runner.max_num_reqs, dtype=torch.bool)

    def room(self, step: Step) -> NDArray[np.int32]:
        """int32 [R]: how many tokens each of `step.rows` may draft, by its reserved slots and max_model_len.

        The n tokens of a request end with one whose KV is not computed yet. A draft of k writes positions n - 1 to
        n + k - 2, and the token after it is sampled at n + k at the latest, so k < max_model_len - n. Beyond the blocks
        of a row its block table holds leftovers of others.
        """
        table = self._table()
        lengths = step.lengths
        allocated = table.num_blocks_per_row[step.rows] * table.block_size
        return np.minimum(allocated - (lengths - 1), self.max_model_len - 1 - lengths).clip(0).astype(np.int32)

    def begin(self, step: Step, chosen: NDArray[np.intp], most: int) -> DraftRound:
        """A round of at most `most` passes for `chosen`, indices into `step.rows`; each has that much `room`."""
        rows = step.rows[chosen]
        first = step.lengths[chosen].astype(np.int64) - 1
        tokens = step.token_rows[rows, first].astype(np.int64)
        table = self._table()
        positions = first[None, :] + np.arange(most, dtype=np.int64)[:, None]
        # Rows with less room than `most` leave the round before they come to positions past their blocks.
        blocks = np.minimum(positions // table.block_size, table.block_table.np.shape[1] - 1)
        slots = table.block_table.np[rows[None, :], blocks].astype(np.int64) * table.block_size
        slots += positions % table.block_size
        pages = step.arguments["common_attn_metadata"].block_table_tensor
        pages = pages[: len(rows)] if len(rows) == step.batch_size else pages[self.tensor(rows.astype(np.int64))]
        return DraftRound(self, tokens, positions, self.tensor(slots), pages)

    def rehearsal(self, batch_size: int) -> DraftRound:
        """A round of one pass that writes nothing, for measuring and warming up."""
        zeros = np.zeros(batch_size, np.int64)
        slots = np.full((1, batch_size), NO_SLOT, np.int64)
        pages = self._table().get_device_tensor(1).expand(batch_size, -1).clone()
        return DraftRound(self, zeros, zeros[None], self.tensor(slots), pages)

    def _table(self) -> Any:
        return self.runner.input_batch.block_table[0]

    def tensor(self, values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)


class DraftRound:
    """Passes one after another for n requests, some of which may stop earlier."""

    def __init__(
        self,
        passes: DraftPasses,
        tokens: NDArray[np.int64],
        positions: NDArray[np.int64],
        slots: torch.Tensor,
        pages: torch.Tensor,
    ) -> None:
        """
        Args:
            tokens: int64 [n], the newest token of each request.
            positions: int64 [K, n], where pass k reads up to.
            slots: int64 [K, n], where it writes.
            pages: int32 [n, P], block tables.
        """
        self.passes = passes
        self.tokens = passes.tensor(tokens)
        self.positions_cpu = positions
        self.positions = passes.tensor(positions)
        self.slots = slots
        self.pages = pages
        self.index = 0

    def keep(self, stay: NDArray[np.bool_]) -> None:
        """Drop the requests that have stopped; `stay` is over those that the last pass had."""
        if stay.all():
            return
        places = np.flatnonzero(stay)
        chosen = self.passes.tensor(places)
        self.tokens = self.tokens[chosen]
        self.pages = self.pages[chosen]
        self.positions_cpu = self.positions_cpu[:, places]
        self.positions = self.positions[:, chosen].contiguous()
        self.slots = self.slots[:, chosen].contiguous()

    def run(self, module: Callable[[torch.Tensor, torch.Tensor], Any]) -> Any:
        """The next pass of `module`; returns what it returns, whose `tokens` the pass after it reads."""
        from vllm.forward_context import override_forward_context

        passes = self.passes
        positions, slots = self.positions[self.index], self.slots[self.index]
        metadata = passes.group.build_metadata_for_drafting(
            common_attn_metadata=self._metadata(positions, slots), draft_index=self.index
        )
        context = passes.context
        context.attn_metadata = dict.fromkeys(passes.group.layer_names, metadata)
        context.slot_mapping = dict.fromkeys(passes.group.layer_names, slots)
        with override_forward_context(context):
            drafted = module(self.tokens, positions)
        self.tokens = drafted.tokens
        self.index += 1
        return drafted

    def _metadata(self, positions: torch.Tensor, slots: torch.Tensor) -> Any:
        from vllm.v1.attention.backend import CommonAttentionMetadata

        passes, n = self.passes, positions.shape[0]
        lengths = (self.positions_cpu[self.index] + 1).astype(np.int32)
        return CommonAttentionMetadata(
            query_start_loc=passes.starts[: n + 1],
            query_start_loc_cpu=passes.starts_cpu[: n + 1],
            seq_lens=passes.tensor(lengths),
            num_reqs=n,
            num_actual_tokens=n,
            max_query_len=1,
            max_seq_len=int(lengths.max()),
            block_table_tensor=self.pages,
            slot_mapping=slots,
            causal=True,
            positions=positions,
            is_prefilling=passes.not_prefilling[:n],
            seq_lens_cpu_upper_bound=torch.from_numpy(lengths),
        )
