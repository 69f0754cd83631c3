"""`MethodSpeculator`: passes steps of vLLM's model runner V2 to `HostDrafting`, and drafts to the device.

Model runner V2 prepares the next step on the device while the host lags behind. So a kernel writes accepted tokens to
pinned memory (`propose`). The host waits for them when the next step lacks only its drafts (`reach`). The kernel that
writes its inputs reads chains there; trees, and drafts of a step that is not prepared yet, go back by one copy.

Every tensor-parallel rank verifies its own copy of the drafts, which rank 0 makes and broadcasts.
"""

from __future__ import annotations

import itertools
import logging
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from freedraft_kernels import top_tokens
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.input_batch import combine_sampled_and_draft_tokens
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from freedraft.engines.draft_round import DraftRanks
from freedraft.engines.vllm.context import ADAPTIVE, SCHEDULE, configured, start_line
from freedraft.engines.vllm.draft_model import PagedDraftModel, prepare_passes
from freedraft.engines.vllm.patching import share_logging
from freedraft.engines.vllm.v2.drafting import HostDrafting, V2StepState
from freedraft.engines.vllm.v2.lengths import GraphLengths
from freedraft.engines.vllm.v2.next_step import NextStep, Stage
from freedraft.engines.vllm.v2.requests import shared
from freedraft.method import METHODS
from freedraft.step import TOP_TOKENS

if TYPE_CHECKING:
    from freedraft.engines.vllm.v2.rows_by_score import RowsByScore
    from freedraft.engines.vllm.v2.trees import Trees
    from freedraft.guarded_method import GuardedMethod

logger = logging.getLogger(__name__)


class MethodSpeculator(BaseSpeculator):
    """Drafts by a method on the host. B requests, K = most draft tokens of a request. vllm_config: vLLM's VllmConfig;
    device: of the model; req_states: the runner's RequestState. Raises ValueError: the method cannot work, which stops
    the start.

    Attributes:
        host: in the drafting rank.
        matches: whether `match` verifies drafts, and not another method of vLLM chosen by the user.
        least: draft tokens of a step that is not drafted for.
        usual_stage: at which steps get their drafts; next: the step that is prepared, and then run, until `propose`
            replaces it.
    """

    supports_mm_inputs = False
    draft_logits = None
    least = 0

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        from vllm.distributed import get_tp_group

        share_logging()
        self._vllm_config, self._ranks = vllm_config, get_tp_group()
        config, ours = vllm_config.speculative_config, configured(vllm_config)
        self.matches: bool = config.rejection_sample_method == "standard"
        self._schedule = getattr(config, SCHEDULE)
        if ours.lengths:  # until `prepare`, so that vLLM lists CUDA graphs for each length, also when profiling
            setattr(config, SCHEDULE, GraphLengths(ours.lengths))
        # vLLM keeps the tokens of all requests on the device for its own n-grams; ours do not read them there.
        tokens = req_states.all_token_ids
        shape = tuple(tokens.gpu.shape)
        req_states.all_token_ids = StagedWriteTensor(shape, tokens.dtype, device, uva_instead_of_gpu=True)
        self._states, self._device = req_states, device
        self.length: int = config.num_speculative_tokens
        self.trees: Trees | None = None
        if ours.shape != "chain":
            from freedraft.engines.vllm.v2.trees import Trees

            self.trees = Trees(vllm_config, device, req_states)
        self.host: HostDrafting | None = None
        if self._ranks.rank_in_group == 0:
            trees = None if self.trees is None else self.trees.trees
            self.host = HostDrafting(vllm_config, device, req_states, trees)
        self._newest = torch.zeros(req_states.max_num_reqs, self.length, dtype=torch.int64, device=device)
        self._make_buffers()
        self.runner: Any = None  # once it has its KV cache, as the next two
        self.draft_model: PagedDraftModel | None = None
        self.by_score: RowsByScore | None = None  # with adaptive verification
        self.usual_stage, self.next = Stage.SAMPLED, NextStep()  # until there is a runner
        self.warming_up = False  # see `warm_up`
        self.enable_adaptive_verification = bool(getattr(config, ADAPTIVE, False))  # read by vLLM, as the next one
        self.draft_token_confidence_probs = None

    def _make_buffers(self) -> None:
        """Make the buffers of drafts by slot, int64 [slots, 1 or 2, K]: tokens, and masks if there may be trees."""
        shape = self._states.max_num_reqs, 1 if self.trees is None else 2, self.length
        self._drafts = torch.zeros(shape, dtype=torch.int64, device=self._device)
        self._proposed, seen = shared(shape, torch.int64, self._device)
        self._states.draft_tokens, self._chains = self._drafts[:, 0], seen[:, 0] if self.trees is None else None
        if self.trees is not None:
            self.trees.masks = self._drafts[:, 1]
        if self.host is not None:
            self.host.proposed = self._proposed.numpy()

    @property
    def guarded(self) -> GuardedMethod | None:
        """The method, on the drafting rank."""
        return None if self.host is None else self.host.guarded

    def close(self) -> None:
        """Release all memory: the process may outlive the engine."""
        if self.guarded is not None:
            self.guarded.close()
        self.host = self.runner = self.draft_model = self.trees = None

    def warm_up(self, now: bool) -> None:
        """Set whether vLLM runs dummy requests now, to compile kernels; their outcomes are ignored."""
        self.warming_up = now
        if self.trees is not None:
            self.trees.buffers.warming_up = now

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Required by vLLM; we capture no graphs here."""

    def capture(self) -> None:
        """Capture graphs of draft passes, after vLLM's own graphs."""
        if self.draft_model is not None:
            self.draft_model.capture(self.runner.block_tables.block_tables[0].gpu.shape[1])

    def prepare(self, runner: Any) -> None:
        """Called once vLLM's GPUModelRunner has its KV cache, before requests. Raises UnsupportedModel: the model
        supports no draft passes; ValueError: see `check_attention`."""
        name, host = configured(self._vllm_config).name, self.host
        check_attention(runner, self._vllm_config.scheduler_config.async_scheduling)
        setattr(self._vllm_config.speculative_config, SCHEDULE, self._schedule)
        if host is not None:
            logger.info(start_line(self._vllm_config, name, v2=True))
            host.runner = runner
        if self.trees is not None and not DraftRanks(self._ranks).agree(self.trees.prepare(runner)):
            self.trees.buffers.enabled = False  # another rank cannot prepare trees
            self.trees = None
            self._make_buffers()
        self.runner = runner
        usual = type(runner.model_state).prepare_inputs is DefaultModelState.prepare_inputs
        # They read the tokens before `prepare_inputs`.
        readers = METHODS[name].runs_model, runner.uses_inputs_embeds, runner.ubatch_runner
        if not runner.pcp_manager and not runner.use_pp:  # stages get the drafts that `propose` returns
            self.usual_stage = Stage.MODEL if usual and not any(readers) else Stage.SLOTS
        if getattr(runner, "adaptive_verification", None) is not None:
            self.verify_by_score()
        if METHODS[name].runs_model:
            self.draft_model = prepare_passes(runner, self._vllm_config, self.guarded)

    def verify_by_score(self) -> None:
        """Replace the runner's AdaptiveVerificationManager."""
        from freedraft.engines.vllm.v2.rows_by_score import RowsByScore

        self.by_score = RowsByScore(self.runner, self._ranks, again=self.usual_stage is Stage.MODEL)
        self.runner.adaptive_verification = self.by_score
        if self.host is not None:
            self.host.by_score = self.by_score

    @torch.inference_mode()
    def propose(
        self, input_batch: Any, attn_metadata: Any, slot_mappings: Any, last_hidden_states: torch.Tensor,
        aux_hidden_states: Any, num_sampled: torch.Tensor, num_rejected: torch.Tensor, last_sampled: torch.Tensor,
        *args: Any, dummy_run: bool = False, is_profile: bool = False, num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """The step just launched is sampled: begin the next one. Returns int64 [B, K] on the device: the drafts if they
        are due, otherwise each request's newest token as placeholder. input_batch: vLLM's InputBatch; num_sampled:
        int32 [B], new tokens of each request; last_sampled: int64 [slots, 1]."""
        batch, host = input_batch.num_reqs, self.host
        drafts = self._newest[:batch]
        if host is not None:
            host.steps += 1
        if dummy_run or is_profile:
            return self.under(drafts)
        if self.warming_up:
            if host is not None:  # its kernel is compiled, too
                host.copy_gained(input_batch, (num_sampled, num_rejected), drafts)
            return self.under(drafts.zero_())
        if self.by_score is not None:
            self.by_score.end_step(input_batch)
        slots, on_device = input_batch.idx_mapping_np[:batch], input_batch.idx_mapping[:batch]
        # The bound is exact in prefill.
        over = input_batch.seq_lens_cpu_upper_bound.numpy()[:batch] >= self._states.prefill_len.np[slots]
        step, queued = NextStep(slots.copy(), alone=not self.runner.use_pp), False
        if host is not None:
            with host.guarded:
                host.catch_up()
            with host.guarded:
                host.queue_copy(input_batch, (num_sampled, num_rejected), drafts, last_hidden_states, over)
                queued = True
            with host.guarded:
                if self.next.logits is not None:  # behind the tokens, which the host waits for
                    host.recycle(*self.next.logits)
            with host.guarded:
                step.lengths = host.decide(batch)
        if not queued:
            drafts.copy_(last_sampled.view(-1)[on_device.long()][:, None].expand_as(drafts))
        drafts = self.under(drafts)  # the host waits for none of it
        self.next, step.most = step, self.length if num_speculative_tokens is None else num_speculative_tokens
        at_once = self.usual_stage is Stage.SAMPLED or input_batch.has_structured_output_reqs
        if step.most > self.least and over.any():  # which requests gained tokens is known after the wait
            step.due = Stage.SAMPLED if at_once else self.usual_stage
        if at_once:
            self._states.draft_tokens[on_device] = drafts  # as vLLM does with the result
            self.reach(Stage.SAMPLED)
            drafts = self._states.draft_tokens[on_device]
        return drafts

    def under(self, drafts: torch.Tensor) -> torch.Tensor:
        """Placeholders for drafts, int64 [B, K]; or, of a drafter that ours are on top of, its drafts."""
        return drafts

    def begin_step(self, batch: Any, slot_mappings: torch.Tensor) -> None:
        """KV slots of the next step are chosen. batch: vLLM's InputBatch; slot_mappings: int64 [1, T]."""
        step = self.next
        step.batch = batch
        if self.by_score is not None and not self.by_score.begin_step(batch):
            step.due = None  # nothing is verified: the tokens of the step before are taken later
        self.reach(Stage.SLOTS)
        if self.trees is not None:  # behind draft passes, which attend to chains
            self.trees.begin_step(step, slot_mappings[0])
            if step.due is None:
                self.trees.write_queries(step)

    def reach(self, stage: Stage) -> None:
        """If the drafts of the next step are due at this stage, on all ranks: wait for the newest tokens, draft after
        them, and pass the drafts on."""
        step = self.next
        if step.due is not stage:
            return
        step.due, drafted = None, False
        if self.host is not None:
            with nullcontext() if self.draft_model is None else self.draft_model.ranks.leading(), self.host.guarded:
                drafted = self.host.draft(step.most, step.batch)
        elif self.draft_model is not None:
            self.draft_model.serve(V2StepState(self.runner.block_tables, self._states, np.zeros(0, np.intp)).pages)
        drafted = self._share(step, drafted)
        self._copy(step, drafted)
        if step.batch is not None:
            self._place(step.batch, drafted)
            if self.trees is not None:
                self.trees.write_queries(step)

    def _share(self, step: NextStep, drafted: bool) -> bool:
        """Pass drafts on to all ranks. Returns whether there are any."""
        if self._ranks.world_size > 1:  # by memory that they share: no kernel stands between tokens and launch
            proposed = self._proposed.numpy()[step.rows]
            sent = self._ranks.broadcast_object(proposed if drafted else None, src=0)
            if self.host is None and (drafted := sent is not None):
                self._proposed.numpy()[step.rows] = sent
        return drafted

    def _copy(self, step: NextStep, drafted: bool) -> None:
        """Copy drafts to the device, on all ranks. The copy is one block of slots: a slot in it that was not in the
        step gets the drafts that it has once more, or none. In a pipeline, other steps verify theirs: one by one."""
        if drafted and step.batch is not None and self._chains is not None:
            pass  # the device reads them from the host's memory
        elif not step.alone:
            self._drafts[step.slots] = self._proposed[step.slots].to(self._device) if drafted else 0
        elif drafted:
            self._drafts[step.rows].copy_(self._proposed[step.rows], non_blocking=True)
        else:  # chains of the token 0, on all ranks
            self._drafts[step.rows].zero_()

    def _place(self, batch: Any, drafted: bool) -> None:
        """Write drafts among the input tokens of the step that verifies them. batch: vLLM's InputBatch."""
        states, by_score = self._states, self.by_score if self.by_score is not None and self.by_score.late else None
        drafts = self._chains if drafted and self._chains is not None else states.draft_tokens
        if by_score is not None:
            by_score.place(batch, drafted)
        batch.logits_indices = combine_sampled_and_draft_tokens(
            self.runner.input_buffers.input_ids, batch.idx_mapping, states.last_sampled_tokens, batch.query_start_loc,
            batch.seq_lens, states.prefill_len.gpu, drafts, batch.cu_num_logits, len(batch.logits_indices),
        )  # fmt: skip
        if by_score is not None:
            by_score.attention()

    def keep_logits(self, logits: torch.Tensor, input_batch: Any) -> None:
        """The model has run. Keep its logits until `propose` recycles them; sampling does not modify them. logits:
        float [R, V], rows of a request consecutive."""
        if self.host is not None and self.host.guarded.needs_logits:
            if self.warming_up:
                top_tokens(logits[:1], TOP_TOKENS)
            else:
                self.next.logits = logits, input_batch
        if self.trees is not None:
            if self.warming_up:
                self.trees.warm_up_verification()
            self.trees.restore_positions(self.next, input_batch)


def check_attention(runner: Any, asynchronous: bool) -> None:
    """Refuse latent attention that reads drafts as parts of prompts: of those vLLM counts the tokens before them on the
    host, which takes the last drafts to be accepted when it does not know yet. Raises ValueError of one line."""
    for group in itertools.chain(*runner.attn_groups) if asynchronous else ():
        if any(hasattr(b, "query_len_support") and b.reorder_batch_threshold == 1 for b in group.metadata_builders):
            raise ValueError(
                f"attention {group.backend.get_name()} reads drafts as prompts, with wrong tokens under async "
                "scheduling: add --attention-backend TRITON_MLA or FLASHINFER_MLA, or serve without speculation"
            )
