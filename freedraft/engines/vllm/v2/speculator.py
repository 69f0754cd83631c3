"""`MethodSpeculator`: how a `Method` of ours sees requests and steps in vLLM's model runner V2.

Model runner V2 prepares the next step on the device while the host is behind, so what a step accepted is asked for by
one copy to pinned memory (`propose`), and waited for when the next one is ready but for its drafts, which go back by
one copy (`join`).

Every tensor-parallel rank verifies its own copy of the drafts: rank 0 drafts, and the others get its tokens.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from freedraft_kernels import top_tokens
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.input_batch import combine_sampled_and_draft_tokens
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from freedraft.engines.draft_ranks import DraftRanks
from freedraft.engines.hooks import check
from freedraft.engines.vllm.configured import ADAPTIVE, SCHEDULE, configured
from freedraft.engines.vllm.context import start_line
from freedraft.engines.vllm.draft_model import PagedDraftModel, prepare_passes
from freedraft.engines.vllm.hooks import V2_SAMPLING_HOOKS
from freedraft.engines.vllm.patching import share_logging
from freedraft.engines.vllm.v2.confidences import Confidences
from freedraft.engines.vllm.v2.drafting import Drafting, V2StepState
from freedraft.engines.vllm.v2.lengths import GraphLengths
from freedraft.method import METHODS
from freedraft.step import TOP_TOKENS

logger = logging.getLogger(__name__)


class MethodSpeculator(Drafting, BaseSpeculator):
    """Drafts by a method on the host. B requests, K = most draft tokens of a request. vllm_config: vLLM's VllmConfig;
    device: of the model; req_states: the runner's RequestState. Raises ValueError: the method cannot work, which stops
    the start."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        from vllm.distributed import get_tp_group

        share_logging()
        self._vllm_config, self._ranks = vllm_config, get_tp_group()
        config, ours = vllm_config.speculative_config, configured(vllm_config)
        self._schedule = getattr(config, SCHEDULE)
        if ours.lengths:  # until `prepare`, so that vLLM lists CUDA graphs for each of them, when it profiles and later
            setattr(config, SCHEDULE, GraphLengths(ours.lengths))
        # vLLM has the tokens of all requests on the device for its own n-grams, which read them; ours do not.
        tokens = req_states.all_token_ids
        shape = tuple(tokens.gpu.shape)
        req_states.all_token_ids = StagedWriteTensor(shape, tokens.dtype, device, uva_instead_of_gpu=True)
        super().__init__(vllm_config, device, req_states, drafts=self._ranks.rank_in_group == 0)
        self.draft_model: PagedDraftModel | None = None
        self._awaited: tuple[torch.Tensor, int] | None = None  # slots, and most draft tokens of each, until `join`
        self.joins_at_once, self.joins_last = True, False  # until there is a runner
        self.verifying: Any = None  # vLLM's InputBatch, once its inputs are there
        self.warming_up = False  # see `warm_up`
        if getattr(config, ADAPTIVE, False):
            self.verify_adaptively(device)

    @property
    def matches(self) -> bool:
        """Whether drafts are verified by `match`, and not by a way of vLLM's that the user has chosen."""
        return bool(self._vllm_config.speculative_config.rejection_sample_method == "standard")

    def close(self) -> None:
        """The engine ends; the process may go on, and is to have its memory back."""
        if self.guarded is not None:
            self.guarded.close()
        self.guarded = self.session = self.runner = self.draft_model = self.trees = None

    def warm_up(self, now: bool) -> None:
        """Whether vLLM makes up requests now, to compile kernels; their outcomes say nothing."""
        self.warming_up = now
        if self.trees is not None:
            self.trees.warm_up(now)

    def verify_adaptively(self, device: torch.device) -> None:
        """Give vLLM's adaptive verification the confidences that it reads, by these names."""
        self.confidences = Confidences(self.requests.lengths.size, self.length, device)
        self.joins_at_once = True
        self.enable_adaptive_verification = True
        self.draft_token_confidence_probs = self.confidences.device

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """The model is loaded, and vLLM knows what graphs to capture; we have none."""

    def capture(self) -> None:
        """vLLM has captured CUDA graphs of its own."""
        if self.draft_model is not None:
            self.draft_model.capture(self.runner.block_tables.block_tables[0].gpu.shape[1])

    def prepare(self, runner: Any) -> None:
        """The KV cache of vLLM's GPUModelRunner is there; requests come next. Raises UnsupportedModel: the model has no
        draft passes."""
        name = configured(self._vllm_config).name
        setattr(self._vllm_config.speculative_config, SCHEDULE, self._schedule)
        if self.guarded is not None:
            logger.info(start_line(self._vllm_config, name, v2=True))
            if missing := check(V2_SAMPLING_HOOKS):
                line = "freedraft: method '%s': the tokens of a seed are not those without drafts: vLLM lacks %s"
                logger.warning(line, name, "; ".join(missing))
        if self.trees is not None and not DraftRanks(self._ranks).agree(self.trees.prepare(runner)):
            self.trees, self._parts = None, 1
        self.runner = runner
        # Where vLLM sends drafts on, cuts its inputs in parts, or reads confidences before there are inputs.
        self.joins_at_once = bool(runner.pp_handler or runner.pcp_manager or self.confidences)
        # Where nothing but the model itself reads drafts.
        usual = type(runner.model_state).prepare_inputs is DefaultModelState.prepare_inputs
        readers = self.trees, METHODS[name].runs_model, runner.uses_inputs_embeds, runner.ubatch_runner
        self.joins_last = usual and not any(readers)
        if METHODS[name].runs_model:
            self.draft_model = prepare_passes(runner, self._vllm_config, self.guarded)

    @torch.inference_mode()
    def propose(
        self, input_batch: Any, attn_metadata: Any, slot_mappings: Any, last_hidden_states: torch.Tensor,
        aux_hidden_states: Any, num_sampled: torch.Tensor, num_rejected: torch.Tensor, last_sampled: torch.Tensor,
        *args: Any, dummy_run: bool = False, is_profile: bool = False, num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """int64 [B, K] on the device: each request's newest token in the place of drafts, which `join` makes; where
        vLLM asks for them at once, the drafts. input_batch: vLLM's InputBatch of the step that has just been launched;
        num_sampled: int32 [B], tokens that each request gained; last_sampled: int64 [slots, 1]."""
        self._steps += 1
        batch, guarded, confidences = input_batch.num_reqs, self.guarded, self.confidences
        packed = self._of_batch(self._drafts, batch)
        drafts = packed[0]
        if dummy_run or is_profile:
            return drafts
        if self.warming_up:
            if guarded is not None:  # its kernel is compiled, too
                self._copy_gained(input_batch, num_sampled, drafts)
            packed.zero_()
            if confidences is not None:
                confidences.device[:batch].zero_()
            return drafts
        prompts = self._states.prefill_len.np[input_batch.idx_mapping_np[:batch]]
        over = input_batch.seq_lens_cpu_upper_bound.numpy()[:batch] >= prompts  # in which the bound is exact
        if guarded is not None:
            if not guarded.call(self._launch, input_batch, num_sampled, drafts, last_hidden_states, over):
                drafts.copy_(last_sampled.view(-1)[input_batch.idx_mapping[:batch].long()][:, None].expand_as(drafts))
            if self.lengths is not None:
                self.rows = guarded.call(self._decide, batch) or []
        most = self.length if num_speculative_tokens is None else num_speculative_tokens
        # What was gained, if anything, is looked at later, when nobody has to wait for it.
        self._awaited = (input_batch.idx_mapping[:batch], most) if most > 0 and over.any() else None
        if confidences is not None and self._awaited is None:
            confidences.device[:batch].zero_()
        if self.joins_at_once or input_batch.has_structured_output_reqs:
            self.join()
        return drafts

    def join(self, batch: Any = None) -> None:
        """Wait for the newest step's tokens, if that is still to be drafted for, and draft. All ranks do so at the same
        place. batch: vLLM's InputBatch of the step that verifies the drafts, whose inputs are prepared; None where vLLM
        takes what `propose` returns."""
        if self._awaited is None:
            return
        (slots, most), self._awaited = self._awaited, None
        packed, confidences, guarded = self._of_batch(self._drafts, len(slots)), self.confidences, self.guarded
        if guarded is not None:
            with nullcontext() if self.draft_model is None else self.draft_model.ranks.leading():
                drafted = guarded.call(self._draft, most, batch)
            if drafted:
                packed.copy_(self._of_batch(self._proposed, len(slots)), non_blocking=True)
            else:
                packed[1:].zero_()
            if confidences is not None:
                confidences.send(len(slots)) if drafted else confidences.device[: len(slots)].zero_()
        elif self.draft_model is not None:
            self.draft_model.follow(V2StepState(self.runner.block_tables, self._states, np.zeros(0, np.intp)).pages)
        if self._ranks.world_size > 1:
            self._ranks.broadcast(packed, src=0)
            if confidences is not None:
                self._ranks.broadcast(confidences.device[: len(slots)], src=0)
        if self.trees is not None:
            self.trees.put(slots, packed[1])
        if batch is not None:  # where others have got slots meanwhile, these have no drafts yet, and read none
            states = self._states
            states.draft_tokens[slots] = packed[0]
            combine_sampled_and_draft_tokens(
                self.runner.input_buffers.input_ids, batch.idx_mapping, states.last_sampled_tokens,
                batch.query_start_loc, batch.seq_lens, states.prefill_len.gpu, states.draft_tokens,
                batch.cu_num_logits, len(batch.logits_indices),
            )  # fmt: skip

    def take_logits(self, logits: torch.Tensor, input_batch: Any) -> None:
        """A step has been run; logits: float [R, V], those of a request behind each other."""
        guarded, trees = self.guarded, self.trees
        if guarded is not None and guarded.needs_logits:
            if self.warming_up:
                top_tokens(logits[:1], TOP_TOKENS)
            else:
                guarded.call(lambda: self._recycle(logits, input_batch))
        if trees is not None and self.warming_up:
            trees.warm_up_verification()
        if trees is not None:
            trees.restore_positions(input_batch)
