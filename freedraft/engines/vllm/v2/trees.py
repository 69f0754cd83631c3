"""`Trees`: draft trees in vLLM's model runner V2, from the draft to the KV of what is accepted.

The runner takes a tree for a chain of as many draft tokens: the scheduler, KV slots and counts know no more than its
length. What each node follows stays on the device, by the slot of its request. Positions become those of depths, and
attention that of ancestors, after KV slots have been chosen; the accepted path's KV moves to where a chain's would be.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from freedraft_kernels import KVPool, NodeMasks, warm_up_verification, write_tree_queries
from numpy.typing import NDArray
from vllm.v1.worker.gpu.states import RequestState

from freedraft.engines.vllm.configured import configured
from freedraft.engines.vllm.v2.matching import match
from freedraft.engines.vllm.v2.tree_attention import ATTRIBUTE, TreeBuffers, register
from freedraft.engines.vllm.v2.tree_support import needs_chain, why_chains

logger = logging.getLogger(__name__)


class Trees:
    """The trees of a runner, in each tensor-parallel rank. B requests of a step, K = most draft tokens of a request.

    Args:
        device: of the model; states: the runner's RequestState.

    Attributes:
        enabled: whether drafts may be trees; False until the KV cache is there.
        allowed: bool [slots], whether the request there may have one.
    """

    def __init__(self, vllm_config: Any, device: torch.device, states: RequestState) -> None:
        self._vllm_config, self._states = vllm_config, states
        self._asked = configured(vllm_config).options.get("shape") == "tree"
        slots, width = states.max_num_reqs, vllm_config.speculative_config.num_speculative_tokens
        self.enabled = False
        self.allowed: NDArray[np.bool_] = np.zeros(slots, np.bool_)
        self._masks = torch.zeros(slots, width, dtype=torch.int64, device=device)
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self._buffers = TreeBuffers(slots, tokens, 1 + width, device)
        self._parents = torch.zeros(tokens, dtype=torch.int32, device=device)
        self._counts = torch.zeros(slots, dtype=torch.int32, device=device)
        self._pool: KVPool | None = None
        self._batch: Any = None  # vLLM's InputBatch, while it verifies
        self._positions: torch.Tensor | None = None  # int64 [T], while it runs a chain's, then by depth
        self._slots: torch.Tensor | None = None  # int64 [T], its KV slots
        setattr(vllm_config, ATTRIBUTE, self._buffers)
        register(flash=self._asked)  # whose own kernel is faster where there are no trees, and perhaps where there are

    def prepare(self, runner: Any) -> bool:
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
            return False
        logger.info("freedraft: method '%s': drafts are trees, in attention %s", name, attention)
        self.enabled = self._buffers.enabled = True
        return True

    def add(self, requests: Iterable[Any]) -> None:
        """vLLM's NewRequestData have got slots."""
        for request in requests:
            slot = self._states.req_id_to_index[request.req_id]
            self.allowed[slot] = self.enabled and (self._buffers.warming_up or not needs_chain(request))

    def warm_up(self, now: bool) -> None:
        """Whether vLLM makes up requests now, whose drafts are to be trees whatever they ask for."""
        self._buffers.warming_up = now

    def warm_up_verification(self) -> None:
        """Compile what verifies trees."""
        if self.enabled:
            # Slot 0 is of a page that nobody has.
            warm_up_verification((1 + self._masks.shape[1],), self._masks.device, pool=self._pool)

    def put(self, slots: torch.Tensor, masks: torch.Tensor) -> None:
        """What requests verify next. slots: int64 [B]; masks: int64 [B, K], as `NodeMasks`."""
        self._masks[slots] = masks

    def prepare_step(self, batch: Any, slot_mappings: torch.Tensor) -> None:
        """KV slots are chosen; positions and attention metadata come next. batch: vLLM's InputBatch; slot_mappings:
        int64 [1, T]."""
        self._batch, self._positions, buffers = None, None, self._buffers
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
        """The model has run: give InputBatch a chain's positions back, by which vLLM tells drafts from prompts."""
        self._buffers.verifying = False
        if self._positions is not None:
            batch.positions, self._positions = self._positions, batch.positions

    def verify(self, sampler: Any, given: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Verify drafts of some requests of the step, one behind the other, and move the KV of what is accepted.
        sampler: vLLM's RejectionSampler; given: arguments of its `_verify`, whose results are returned: processed
        logits, float [R, V]; int64 [B, 1 + K], tokens; int32 [B], how many of them."""
        batch, slots = self._batch, given["idx_mapping_np"]
        if batch is None:
            return match(sampler, given).sampled()
        assert self._pool is not None and self._slots is not None and self._positions is not None
        first = int(np.flatnonzero(batch.idx_mapping_np == slots[0])[0])  # of the step's requests
        row = int(batch.cu_num_logits_np[first])
        token = batch.logits_indices[row : row + len(given["pos"])]
        counts = self._counts[first : first + len(slots)].clone()  # at an address that kernels are compiled for
        outcome = match(sampler, given | {"pos": self._positions[token]}, self._parents[token], counts)
        # Slot 0 is of a page that nobody has.
        kv_slots = torch.where(outcome.inside, self._slots[token][outcome.rows], 0)
        self._pool.compact(kv_slots, outcome.verification)
        return outcome.sampled()


def _row(cache: torch.Tensor) -> tuple[int, int]:
    """Heads, and numbers of each, of a layer's cache: float [P, H, S, D]."""
    return cache.shape[1], cache.shape[3]
