"""For vLLM's adaptive verification. `RowsByScore`: how many draft tokens a step verifies over its batch, and which;
`Confidences`: how likely n-grams behind those of a head are, for vLLM's own choice.

The number is decided before the drafts are there, by vLLM's measured step costs and a forecast: what the newest drafts
promised. Which draft tokens these are is decided with the drafts: the likeliest of the batch.
"""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.utils.torch_utils import async_tensor_h2d
from vllm.v1.worker.gpu.input_batch import expand_idx_mapping, prepare_pos_seq_lens

from freedraft.cost.acceptance import Acceptance
from freedraft.cost.allocation import keep_likeliest
from freedraft.cost.probes import ProbeSchedule
from freedraft.draft import DraftBatch

_RATE = 0.1  # of the forecast
_PRIOR = 0.5  # probability of a draft token whose predecessors are accepted
_PROBES = 8, 64  # steps without drafts before one with some
_ATTENTION = {"FLASH_ATTN", "TRITON_ATTN"}  # whose metadata can be built again while the stream waits


class RowsByScore:
    """In place of vLLM's AdaptiveVerificationManager, under the names that its runner calls. B requests of a step, K =
    most draft tokens of a request.

    Args:
        runner: vLLM's GPUModelRunner; ranks: its GroupCoordinator of tensor-parallel ranks.
        again: whether drafts come after attention metadata, which is then built again.

    Attributes:
        late: whether the present step's rows are decided with its drafts; otherwise each request has the same number.
        attention: builds the present step's attention metadata again, in the same buffers.
        acceptance: estimates the probabilities of draft tokens.
    """

    def __init__(self, runner: Any, ranks: Any, *, again: bool) -> None:
        self._runner, self._ranks, self._costs = runner, ranks, runner.adaptive_verification
        self.batches_to_profile = self._costs.batches_to_profile
        self.set_initial_cost_curves = self._costs.set_initial_cost_curves
        # vLLM 0.33 also unpacks host copies of drafts' counts, for sampling by shards of the batch; None without.
        results = get_args(get_type_hints(type(self._costs).reallocate_drafts)["return"])
        self._unused = (None,) * (len(results) - 3)
        backends = {group.backend.get_name() for groups in runner.attn_groups for group in groups}
        rebuilt = runner.dcp_size == 1 and backends <= _ATTENTION
        self._by_score = runner.fast_prefill is None and (rebuilt or not again)
        self.late, self.attention = False, lambda: None
        slots, width, device = runner.max_num_reqs, 1 + runner.num_speculative_steps, runner.device
        self.acceptance, self._probes = Acceptance(), ProbeSchedule(*_PROBES)
        self._scores, self._prior = np.zeros((slots, width)), _PRIOR ** np.arange(width)
        self._forecast, self._newest = self._prior[1:], self._prior[:0]  # falling; not seen by it yet
        self._budget, self._counts, self._first_rows = 0, np.zeros(0, np.int32), np.zeros(1, np.int32)
        self._device = torch.zeros(slots, dtype=torch.int64, device=device)
        self._host = torch.zeros(slots, dtype=torch.int64, pin_memory=device.type != "cpu")
        Acceptance.warm_up()
        keep_likeliest(np.ones((1, 2)), np.full(1, 2, np.int32), 1)

    # -- vLLM's names --------------------------------------------------------------------------------------------------

    def add_request(self, *_: Any) -> None:
        """Nothing is known of a new request."""

    record_confidences = add_request  # they stay on the host

    def get_num_tokens(self, tokens: dict[str, int], drafts: dict[str, list[int]]) -> int:
        """Query tokens of a step, by request as scheduled, with as many draft tokens as pay."""
        scheduled = [len(drafts.get(name, ())) for name in tokens]
        others = sum(tokens.values()) - sum(scheduled)
        self._budget = self._decide(others, sum(scheduled), len(tokens), len(scheduled) - scheduled.count(0))
        if self._ranks.world_size > 1:
            self._budget = self._ranks.broadcast_object(self._budget, src=0)
        return others + self._budget

    def compact_batch(
        self, drafts: NDArray[np.int32], scheduled: NDArray[np.int32], cu_num_logits: NDArray[np.int32]
    ) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """int32 [B], query tokens of each request, of `scheduled` with `drafts`; int32 [1 + B], the first row of logits
        of each. Unless the step is `late`, they are final."""
        counts = 1 + drafts
        keep_likeliest(np.tile(self._prior, (len(counts), 1)), counts, self._budget)
        self._counts, self._first_rows = counts - 1, cu_num_logits
        cu_num_logits[1:] = np.cumsum(counts)
        return scheduled - drafts + self._counts, cu_num_logits

    def reallocate_drafts(self, _: Any, idx_mapping: torch.Tensor) -> tuple[Any, ...]:
        """The result of `compact_batch` on the device, and the number of draft tokens."""
        first_rows = async_tensor_h2d(self._first_rows.copy(), device=idx_mapping.device)
        return first_rows, self._runner.input_buffers.query_start_loc, self._budget, *self._unused

    # -- before drafts are there ---------------------------------------------------------------------------------------

    def _decide(self, others: int, drafts: int, requests: int, drafted: int) -> int:
        """Draft tokens to verify. others: query tokens besides; drafts: most; drafted: requests with drafts."""
        if self._newest.size:
            expected, seen = self._expected(self._newest.size), np.sort(self._newest, axis=None)[::-1]
            self._forecast, self._newest = expected + _RATE * (seen - expected), seen[:0]
        most = min(drafts, max(0, self._costs._max_total_logits - requests))
        of_drafting, of_tokens = self._costs.cost_tables
        gained = drafted + np.concatenate(([0.0], np.cumsum(self._expected(drafts)[:most])))
        best = int((gained / (of_drafting[requests] + of_tokens[others : others + most + 1])).argmax())
        if best == 0:
            return min(most, drafted) if self._probes.due() else 0
        self._probes.reset()
        return best

    def _expected(self, count: int) -> NDArray[np.float64]:
        """float64 [count]: the forecast for a batch with this many draft tokens."""
        at, known = ((np.arange(n) + 0.5) / n for n in (max(count, 1), len(self._forecast)))
        return np.interp(at, known, self._forecast)[:count]

    def begin_step(self, batch: Any) -> bool:
        """Called with vLLM's InputBatch of each step. Returns whether drafts are needed."""
        adaptive = batch.max_query_len is not None  # drafts were scheduled, and vLLM does not warm up
        fewer = adaptive and self._budget < int(batch.num_draft_tokens_per_req.sum())
        self.late, self.attention = fewer and self._by_score and not batch.has_prefill, lambda: None
        return not adaptive or self._budget > 0

    # -- when drafts are there -----------------------------------------------------------------------------------------

    def choose(self, draft: DraftBatch | None, slots: NDArray[Any], counts: NDArray[np.int32], batch: Any) -> None:
        """Choose the rows of a late step. draft: of R requests; None if drafting failed; slots: int [R]; counts: int32
        [R], their draft tokens; batch: vLLM's InputBatch of the step that verifies them; None: not prepared yet."""
        following = slots[:0] if batch is None else batch.idx_mapping_np
        self._scores[following] = 0.0
        if draft is not None:
            p = self.acceptance.probabilities(draft)[:, : self._scores.shape[1]]
            self.acceptance.follow(draft)
            self._scores[slots, : p.shape[1]] = np.where(np.arange(p.shape[1]) <= counts[:, None], p, 0.0)
        scores = self._scores[following]
        self._newest = scores[:, 1:]
        if self.late and batch is not None:
            nodes = 1 + batch.num_draft_tokens_per_req
            keep_likeliest(scores, nodes, self._budget)
            self._counts = nodes - 1
            batch.cu_num_logits_np[1:] = np.cumsum(nodes)

    def place(self, batch: Any, drafted: bool) -> None:
        """Queue what the choice of a late step changes on the device, except tokens and attention metadata. drafted:
        whether its tokens were waited for, so that the device has read the last choice."""
        requests, runner = batch.num_reqs, self._runner
        counts, buffers = self._device[:requests], runner.input_buffers
        if drafted:
            self._host.numpy()[:requests] = self._counts
            counts.copy_(self._host[:requests], non_blocking=True)
        else:
            async_tensor_h2d(self._counts.astype(np.int64), out=counts)
        if self._ranks.world_size > 1:
            self._ranks.broadcast(counts, src=0)
        batch.cu_num_logits[1:] = torch.cumsum(counts + 1, 0)
        batch.query_start_loc[1 : requests + 1] = batch.cu_num_logits[1:]
        batch.expanded_idx_mapping, batch.expanded_local_pos = expand_idx_mapping(
            batch.idx_mapping, len(batch.logits_indices), batch.cu_num_logits, runner.decode_query_len
        )
        computed = runner.req_states.num_computed_tokens.gpu
        prepare_pos_seq_lens(batch.idx_mapping, batch.query_start_loc, computed, buffers.positions, buffers.seq_lens)
        runner.block_tables.compute_slot_mappings(
            batch.idx_mapping, batch.query_start_loc, batch.positions, batch.num_tokens_after_padding
        )

    def end_step(self, batch: Any) -> None:
        """vLLM has drawn the step's tokens: set how many draft tokens of each request it has verified."""
        if batch.max_query_len is not None:
            batch.num_draft_tokens_per_req = self._counts


class Confidences:
    """How likely each token of an n-gram is accepted if those before are, by slot and place in the draft.

    Attributes:
        known, on_device: float32 [slots, K], the host's and the device's view of the same memory.
        acceptance: learns from all drafts, whatever was verified of them.
    """

    def __init__(self, memory: torch.Tensor, on_device: torch.Tensor) -> None:
        self.known: NDArray[np.float32] = memory.numpy()
        self.on_device, self.acceptance = on_device, Acceptance()
        Acceptance.warm_up()

    def choose(self, draft: DraftBatch | None, slots: NDArray[Any], counts: NDArray[np.int32], _: Any) -> None:
        """Take those of a draft of R requests; None if drafting failed. slots: int [R]; counts: int32 [R], their draft
        tokens."""
        self.known[slots] = 0.0
        if draft is not None:
            p = self.acceptance.probabilities(draft)[:, : 1 + self.known.shape[1]]
            self.acceptance.follow(draft)
            p = np.where(np.arange(p.shape[1]) <= counts[:, None], p, 0.0)
            self.known[slots, : p.shape[1] - 1] = p[:, 1:] / np.maximum(p[:, :-1], 1e-9)
