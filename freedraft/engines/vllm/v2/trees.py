"""`Trees`: draft trees in vLLM's model runner V2, from the draft to the KV of the accepted path.

The runner treats a tree as a chain of the same number of draft tokens: the scheduler, KV slots and counts know its
length only. Ancestor masks stay on the device, by slot. After KV slots have been chosen, positions are set by depth and
attention by ancestors; the accepted path's KV moves to where a chain's would be.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from freedraft_kernels import KVPool, verify_rows
from freedraft_kernels.device.tree_queries import NodeMasks, write_tree_queries
from numpy.typing import NDArray
from vllm import envs
from vllm.config import CUDAGraphMode
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler
from vllm.v1.worker.gpu.states import RequestState

from freedraft.engines.vllm.context import configured
from freedraft.engines.vllm.v2.matching import match
from freedraft.engines.vllm.v2.next_step import NextStep
from freedraft.engines.vllm.v2.tree_attention import ATTRIBUTE, TreeAttention, TreeBuffers, register

logger = logging.getLogger(__name__)

_STOCK_PROCESSORS = 3  # logits processors: biases, penalties, bad words


class Trees:
    """The trees of a runner, in each tensor-parallel rank. B requests of a step, K = most draft tokens of a request.

    Args:
        device: of the model; states: the runner's RequestState.

    Attributes:
        trees: bool [slots], `Step.trees` by slot.
        masks: int64 [slots, K], as in `NodeMasks`, the trees that requests verify next.
        buffers: of attention, which tell whether drafts may be trees; not before the KV cache exists.
    """

    masks: torch.Tensor

    def __init__(self, vllm_config: Any, device: torch.device, states: RequestState) -> None:
        self._vllm_config, self._states = vllm_config, states
        self._asked = configured(vllm_config).shape == "tree"
        slots, width = states.max_num_reqs, vllm_config.speculative_config.num_speculative_tokens
        self.trees: NDArray[np.bool_] = np.zeros(slots, np.bool_)
        tokens = vllm_config.scheduler_config.max_num_batched_tokens
        self.buffers = TreeBuffers(slots, tokens, 1 + width, device)
        self._parents = torch.zeros(tokens, dtype=torch.int32, device=device)
        self._counts = torch.zeros(slots, dtype=torch.int32, device=device)
        self._pool: KVPool | None = None
        setattr(vllm_config.speculative_config, ATTRIBUTE, self.buffers)
        register(flash=self._asked)  # its own kernel is faster without trees, and perhaps with them

    def prepare(self, runner: Any) -> bool:
        """Called once vLLM's GPUModelRunner has its KV cache: log and return whether drafts are trees."""
        name = configured(self._vllm_config).name
        try:
            if (reason := why_chains(runner, self._vllm_config)) is None:
                attention = runner.attn_groups[0][0].backend.get_name()
                self._pool = KVPool([cache.transpose(1, 2).view(-1, *cache.shape[1::2]) for cache in runner.kv_caches])
        except Exception as error:  # another structure of vLLM or of the model
            reason = f"they cannot be prepared here ({(str(error) or repr(error)).splitlines()[0]})"
        if reason is not None:
            level = logging.WARNING if self._asked else logging.INFO
            logger.log(level, "freedraft: method '%s': drafts are chains, not trees: %s", name, reason)
            return False
        logger.info("freedraft: method '%s': drafts are trees, in attention %s", name, attention)
        self.buffers.enabled = True
        return True

    def add(self, requests: Iterable[Any]) -> None:
        """Add requests (vLLM's NewRequestData) that got slots."""
        for request in requests:
            slot = self._states.req_id_to_index[request.req_id]
            # Dummy requests always have trees.
            self.trees[slot] = self.buffers.enabled and (self.buffers.warming_up or not needs_chain(request))

    def warm_up_verification(self) -> None:
        """Compile the kernels that verify trees, and chains among them."""
        if self._pool is not None:
            zero, width = torch.zeros(1, dtype=torch.int64, device=self.masks.device), 1 + self.masks.shape[1]
            token, starts = zero.int(), torch.arange(2, dtype=torch.int32, device=zero.device)
            verify_rows(token, zero, starts, width)
            # Slot 0 is of a page that nobody has.
            outcome, slots = verify_rows(token, zero, starts, width, (token, zero, zero, starts[1:]))
            self._pool.compact(slots, outcome)

    def begin_step(self, step: NextStep, kv_slots: torch.Tensor) -> None:
        """Called between the choice of KV slots, int64 [T], and attention metadata."""
        step.positions, step.has_trees, batch, buffers = None, False, step.batch, self.buffers
        buffers.verifying = False
        if buffers.enabled and batch.num_draft_tokens > 0:
            step.positions, step.kv_slots = batch.positions.clone(), kv_slots
            step.has_trees = bool((self.trees[batch.idx_mapping_np] & (batch.num_draft_tokens_per_req > 0)).any())
            buffers.verifying, buffers.mixed = step.has_trees, bool(batch.has_prefill)

    def write_queries(self, step: NextStep) -> None:
        """Set positions by depth, and tree queries; called after `begin_step`, once the drafts are there."""
        if step.positions is None:
            return
        batch = step.batch
        requests = batch.num_reqs
        write_tree_queries(
            NodeMasks(self.masks, self._states.prefill_len.gpu),
            batch.idx_mapping[:requests],
            batch.cu_num_logits,
            self.buffers.queries(batch.query_start_loc[: requests + 1], batch.seq_lens[:requests]),
            batch.positions,
            self._parents,
            self._counts,
        )

    def restore_positions(self, step: NextStep, batch: Any) -> None:
        """Restore a chain's positions in InputBatch after the model has run: vLLM distinguishes drafts from prompts by
        them."""
        self.buffers.verifying = False
        if step.positions is not None:
            batch.positions, step.positions = step.positions, batch.positions

    def verify(
        self, sampler: Any, given: dict[str, Any], step: NextStep
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Verify the drafts of consecutive requests of the step, and move the KV of accepted paths. sampler: vLLM's
        RejectionSampler; given: arguments of its `_verify`. Returns its results: processed logits, float [R, V]; int64
        [B, 1 + K], tokens; int32 [B], their number."""
        batch, slots = step.batch, given["idx_mapping_np"]
        if not step.has_trees:
            return match(sampler, given)
        assert self._pool is not None and step.kv_slots is not None and step.positions is not None
        first = int(np.flatnonzero(batch.idx_mapping_np == slots[0])[0])  # of the step's requests
        row = int(batch.cu_num_logits_np[first])
        tokens = batch.logits_indices[row : row + len(given["pos"])]
        trees = self._parents, step.kv_slots, tokens, self._counts[first : first + len(slots)]
        return match(sampler, given | {"pos": step.positions[tokens]}, trees, self._pool)


def why_chains(runner: Any, vllm_config: Any) -> str | None:
    """Why drafts of this engine must be chains, in words for the user; None if they may be trees."""
    model, ours = vllm_config.model_config, vllm_config.speculative_config
    sampler = runner.sampler
    engine = {
        "adaptive verification": ours.enable_adaptive_verification,
        f"rejection sampling method '{ours.rejection_sample_method}'": ours.rejection_sample_method != "standard",
        "context parallelism": runner.dcp_size > 1 or runner.pcp_manager is not None,
        "pipeline parallelism": runner.use_pp,
        "microbatches": runner.ubatch_runner is not None,
        "sampling by shards of the batch": runner.batch_sharder is not None,
        "routed experts": vllm_config.aux_output_config.enabled,
        "batch invariance": envs.VLLM_BATCH_INVARIANT,
        "a KV connector": vllm_config.kv_transfer_config is not None,
        "watermarks": vllm_config.watermark_config is not None,
        "replay of traces": sampler is not None and sampler.trace_replay_state is not None,
        "a sampler of the model's own": type(runner.rejection_sampler) is not RejectionSampler,
        "sampling masks": sampler is not None and sampler.return_sampling_mask,
        "logits processors": sampler is not None and len(sampler.logits_processors) > _STOCK_PROCESSORS,
        "positions of several dimensions": getattr(runner.model_state, "rope_state", None) is not None,
        "MLA": model.use_mla,
        "attention that quantises its output": vllm_config.compilation_config.pass_config.fuse_attn_quant,
        "an encoder": runner.is_encoder_decoder,
        "fast prefill of shared KV": runner.fast_prefill is not None,
    }
    if (found := next((name for name, has in engine.items() if has), None)) is not None:
        return f"trees do not go with {found}"
    groups = runner.kv_cache_config.kv_cache_groups
    if len(groups) != 1 or type(groups[0].kv_cache_spec) is not FullAttentionSpec:
        return "trees need full attention of one kind in all layers"
    for backend in {group.backend for group in runner.attn_groups[0]}:
        if not issubclass(backend.get_impl_cls(), TreeAttention):
            name, instead = backend.get_name(), "add --attention-backend TRITON_ATTN"
            if name == "FLASH_ATTN":
                instead = 'set the option "shape" to "tree" or ' + instead
            return f"attention {name} cannot mask them: for trees, {instead}"
    layers = vllm_config.compilation_config.static_forward_context
    for name in groups[0].layer_names:
        if (found := layers[name].impl.why_not()) is not None:
            return f"trees do not go with {found}"
    if runner.cudagraph_manager.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL:
        return "trees do not go with CUDA graph mode FULL: use FULL_AND_PIECEWISE"
    if not all(map(_rows_are_slots, runner.kv_caches)):
        return "trees need a KV cache in layout NHD (LBNHC), a layer's pages one behind the other"
    return None


def _rows_are_slots(cache: torch.Tensor) -> bool:
    """Whether a token's data in a layer's cache, [P, H, S, D], is contiguous, one piece per slot."""
    tokens = cache.transpose(1, 2)
    return tokens[0, 0].is_contiguous() and tokens.stride(0) == tokens.shape[1] * tokens.stride(1)


def needs_chain(request: Any) -> bool:
    """Whether parameters of vLLM's NewRequestData depend on earlier tokens, which vLLM's samplers take from a chain."""
    parameters = request.sampling_params
    return parameters is None or bool(
        parameters.structured_outputs is not None
        or parameters.repetition_penalty != 1.0
        or parameters.presence_penalty
        or parameters.frequency_penalty
        or parameters.bad_words
        or parameters.min_tokens
        or parameters.logprobs is not None
        or parameters.logprob_token_ids
        or parameters.thinking_token_budget is not None
        or request.prompt_embeds is not None
    )
