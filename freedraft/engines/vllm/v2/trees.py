"""`Trees`: draft trees in vLLM's model runner V2, from the draft to the KV of what is accepted.

The runner takes a tree for a chain of as many draft tokens: the scheduler, KV slots and counts know no more than its
length. What each node follows stays on the device, by the slot of its request. Positions become those of depths, and
attention that of ancestors, after KV slots have been chosen; the accepted path's KV moves to where a chain's would be.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from freedraft_kernels import (
    KVPool,
    NodeMasks,
    TreeBatch,
    Verification,
    verify_greedy,
    verify_sampled,
    warm_up_verification,
    write_tree_queries,
)
from numpy.typing import NDArray
from vllm.utils.torch_utils import async_tensor_h2d

from freedraft.engines.vllm.configured import configured
from freedraft.engines.vllm.v2.tree_attention import ATTRIBUTE, TreeBuffers, register
from freedraft.engines.vllm.v2.tree_support import needs_chain, why_chains

logger = logging.getLogger(__name__)

# Arguments of RejectionSampler._verify that Sampler.apply_sampling_params takes, in its order
_PROCESSED_BY = (
    "logits",
    "expanded_idx_mapping",
    "idx_mapping",
    "idx_mapping_np",
    "pos",
    "draft_sampled",
    "expanded_local_pos",
    "seq_lens_upper_bound_np",
)

# That sampled trees are verified with at once, float32: vLLM leaves no memory for more than it samples from itself
_MOST_PROBABILITIES = 1 << 26


class Trees:
    """The trees of a runner, in each tensor-parallel rank. B requests of a step, K = most draft tokens of a request.

    Args:
        vllm_config: vLLM's VllmConfig; device: of the model; states: the runner's RequestState.

    Attributes:
        enabled: whether drafts may be trees; False until the KV cache is there.
        allowed: bool [slots], whether the request there may have one.
    """

    def __init__(self, vllm_config: Any, device: torch.device, states: Any) -> None:
        self._vllm_config, self._states = vllm_config, states
        self._asked = configured(vllm_config).options.get("shape") == "tree"
        slots, width = states.max_num_reqs, vllm_config.speculative_config.num_speculative_tokens
        self.enabled = False
        self.allowed: NDArray[np.bool_] = np.zeros(slots, np.bool_)
        self._device = device
        self._masks = torch.zeros(slots, width, dtype=torch.int64, device=device)
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._buffers = TreeBuffers(slots, tokens, 1 + width, device)
        self._parents = torch.zeros(tokens, dtype=torch.int32, device=device)
        self._counts = torch.zeros(slots, dtype=torch.int32, device=device)
        self._columns = torch.arange(1 + width, device=device)
        self._pool: KVPool | None = None
        self._batch: Any = None  # vLLM's InputBatch, while it verifies
        self._positions: torch.Tensor | None = None  # of it, as a chain's
        self._slots: torch.Tensor | None = None  # int64 [T], its KV slots
        setattr(vllm_config, ATTRIBUTE, self._buffers)
        register(flash=self._asked)  # whose own kernel is faster where there are no trees, and perhaps where there are

    def prepare(self, runner: Any) -> None:
        """The KV cache of vLLM's GPUModelRunner is there: say whether drafts are trees."""
        name = configured(self._vllm_config).name
        try:
            if (reason := why_chains(runner, self._vllm_config)) is None:
                attention = runner.attn_groups[0][0].backend.get_name()
                self._pool = KVPool([cache.transpose(1, 2).view(-1, *_row(cache)) for cache in runner.kv_caches])
        except Exception as error:  # a vLLM or a model that is built otherwise
            reason = f"they cannot be prepared here ({(str(error) or repr(error)).splitlines()[0]})"
        if reason is not None:
            level = logging.WARNING if self._asked else logging.INFO
            logger.log(level, "freedraft: method '%s': drafts are chains: %s", name, reason)
            return
        logger.info("freedraft: method '%s': drafts are trees, in attention %s", name, attention)
        self.enabled = self._buffers.enabled = True

    def add(self, requests: Iterable[Any]) -> None:
        """vLLM's NewRequestData have got slots."""
        for request in requests:
            slot = self._states.req_id_to_index[request.req_id]
            self.allowed[slot] = self.enabled and (self._buffers.warming_up or not needs_chain(request))

    def warm_up(self, now: bool) -> None:
        """Whether vLLM makes up requests now, whose drafts are to be trees whatever they ask for."""
        self._buffers.warming_up = now

    def warm_up_verification(self, logits: torch.Tensor) -> None:
        """Compile what verifies trees of all widths. logits: float [R, V], of a step that vLLM has made up."""
        if self.enabled:
            # Slot 0 is of a page that nobody has.
            warm_up_verification(range(2, 1 + len(self._columns)), logits[:1], pool=self._pool)

    def put(self, slots: torch.Tensor, masks: torch.Tensor) -> None:
        """What requests verify next. slots: int64 [B]; masks: int64 [B, K], as `NodeMasks`."""
        self._masks[slots] = masks

    def prepare_step(self, batch: Any, slot_mappings: torch.Tensor) -> None:
        """KV slots are chosen; positions and attention metadata come next. batch: vLLM's InputBatch; slot_mappings:
        int64 [1, T]."""
        self._batch, buffers = None, self._buffers
        buffers.verifying = False
        if not self.enabled or batch.num_draft_tokens == 0:
            return
        requests = batch.num_reqs
        self._positions, self._slots = batch.positions.clone(), slot_mappings[0]
        write_tree_queries(
            NodeMasks(self._masks, self._states.prefill_len.gpu),
            batch.idx_mapping[:requests],
            batch.cu_num_logits,
            buffers.queries(batch.query_start_loc[: requests + 1], batch.seq_lens[:requests]),
            batch.positions,
            self._parents,
            self._counts,
        )
        if (self.allowed[batch.idx_mapping_np] & (batch.num_draft_tokens_per_req > 0)).any():
            self._batch, buffers.verifying, buffers.mixed = batch, True, bool(batch.has_prefill)

    def restore_positions(self, batch: Any) -> None:
        """The model has run: give InputBatch a chain's positions back, which vLLM's samplers go by."""
        self._buffers.verifying = False
        if self._positions is not None:
            batch.positions, self._positions = self._positions, None

    def verify(self, sampler: Any, original: Callable[..., Any], given: dict[str, Any]) -> tuple[torch.Tensor, ...]:
        """What vLLM's RejectionSampler says of some requests of the step, one behind the other, with trees verified.
        sampler: the RejectionSampler; original: its `_verify`; given: its arguments. Returns processed logits, float
        [R, V]; int64 [B, 1 + K], tokens; int32 [B], how many of them."""
        batch, slots = self._batch, given["idx_mapping_np"]
        if batch is None:
            return original(sampler, **given)
        first = int(np.flatnonzero(batch.idx_mapping_np == slots[0])[0])  # of the step's requests
        drafts = batch.num_draft_tokens_per_req[first : first + len(slots)]
        ours = np.flatnonzero(self.allowed[slots] & (drafts > 0))
        if len(ours) < len(slots) or self._buffers.warming_up:  # which compiles vLLM's own kernels, too
            logits, tokens, lengths = original(sampler, **given)
            if not len(ours):
                return logits, tokens, lengths
        else:
            logits = sampler.sampler.apply_sampling_params(*(given[name] for name in _PROCESSED_BY))
            tokens = torch.zeros(len(slots), len(self._columns), dtype=torch.int64, device=self._device)
            lengths = torch.zeros(len(slots), dtype=torch.int32, device=self._device)
        width = 1 + int(drafts[ours].max())
        rows = async_tensor_h2d(ours, device=self._device, dtype=torch.int64)
        verified = self._verify(sampler.sampler, logits, given, rows, slots[ours], first, width)
        tokens[rows, :width] = verified.tokens.long()
        lengths[rows] = verified.lengths.to(lengths.dtype)
        return logits, tokens, lengths

    def _verify(
        self,
        sampler: Any,
        logits: torch.Tensor,
        given: dict[str, Any],
        rows: torch.Tensor,
        slots: NDArray[np.intp],
        first: int,
        width: int,
    ) -> Verification:
        """Verify the trees of some requests, and move the KV of what is accepted. rows: int64 [R], the requests,
        counted from the step's `first`; slots: [R], theirs; width: N, most nodes of them."""
        batch, offsets = self._batch, given["cu_num_logits"]
        ends, column = offsets[rows + 1].long()[:, None], self._columns[:width]
        starts = offsets[rows].long()[:, None]
        inside = starts + column < ends
        node = torch.minimum(starts + column, ends - 1)  # rows of logits
        counts = self._counts[rows + first]
        token = batch.logits_indices[node + batch.cu_num_logits[first]]
        drafted = given["draft_sampled"][node]
        tree = TreeBatch(drafted, self._parents[token], column.int().expand_as(drafted).contiguous(), counts)
        state = sampler.sampling_states
        some = np.flatnonzero(state.temperature.np[slots])
        if len(some) < len(slots):
            verified = verify_greedy(tree, logits.argmax(-1)[node])
        else:
            empty, of_each = torch.empty_like(drafted), torch.empty_like(counts)
            verified = Verification(empty, of_each, empty.clone(), of_each.clone())
        at_once = max(_MOST_PROBABILITIES // (width * logits.shape[1]), 1)
        for i in range(0, len(some), at_once):
            part = async_tensor_h2d(some[i : i + at_once], device=self._device, dtype=torch.int64)
            of_part = TreeBatch(*(each[part] for each in (tree.tokens, tree.parents, tree.depths, tree.counts)))
            seeds, roots = state.seeds.gpu[batch.idx_mapping[first + rows[part]]], given["pos"][starts[part, 0]]
            outcome = verify_sampled(of_part, _probabilities(logits[node[part]]), seeds, roots)
            for name in ("accepted", "lengths", "tokens", "bonus"):
                getattr(verified, name)[part] = getattr(outcome, name)
        assert self._pool is not None and self._slots is not None
        # Slot 0 is of a page that nobody has.
        self._pool.compact(torch.where(inside, self._slots[token], 0), verified)
        return verified


def _row(cache: torch.Tensor) -> tuple[int, int]:
    """Heads, and numbers of each, of a layer's cache: float [P, H, S, D]."""
    return cache.shape[1], cache.shape[3]


def _probabilities(logits: torch.Tensor) -> torch.Tensor:
    """float32 [R, N, V] of logits, in whose place they may be written."""
    logits = logits.float()
    logits.sub_(logits.amax(-1, keepdim=True)).exp_()
    return logits.div_(logits.sum(-1, keepdim=True))
