"""`MethodSpeculator`: how a `Method` of ours sees requests and steps in vLLM's model runner V2.

Model runner V2 prepares the next step on the device while the host is behind, so what a step accepted is asked for by
one copy to pinned memory (`propose`), and waited for when the next one is ready but for its drafts, which go back by
one copy (`join`).

Every tensor-parallel rank verifies its own copy of the drafts: rank 0 drafts, and the others get its tokens.
"""

from __future__ import annotations

import logging
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from freedraft_kernels import top_tokens
from numpy.typing import NDArray
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.input_batch import combine_sampled_and_draft_tokens
from vllm.v1.worker.gpu.model_states.default import DefaultModelState
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from freedraft.cost.batch_lengths import BatchLengths, Rows
from freedraft.cost.yields import TreeYields
from freedraft.engines.draft_ranks import DraftRanks
from freedraft.engines.hooks import check
from freedraft.engines.logits_copy import LogitsCopy
from freedraft.engines.vllm.configured import ADAPTIVE, SCHEDULE, configured
from freedraft.engines.vllm.context import context_of_engine, tokenizer_of
from freedraft.engines.vllm.draft_model import PagedDraftModel
from freedraft.engines.vllm.hooks import V2_SAMPLING_HOOKS, V2_TREE_HOOKS
from freedraft.engines.vllm.kept_layers import Backbone, UnsupportedModel
from freedraft.engines.vllm.patching import share_logging
from freedraft.engines.vllm.start_line import start_line
from freedraft.engines.vllm.v2.confidences import Confidences
from freedraft.engines.vllm.v2.events import RequestEvents
from freedraft.engines.vllm.v2.gained_tokens import GainedTokens
from freedraft.engines.vllm.v2.graph_lengths import GraphLengths
from freedraft.engines.vllm.v2.requests import Requests
from freedraft.engines.vllm.v2.step_state import V2StepState
from freedraft.engines.vllm.v2.write_drafts import write_drafts
from freedraft.guarded_method import GuardedMethod
from freedraft.method import METHODS
from freedraft.step import TOP_TOKENS, Step

if TYPE_CHECKING:
    from freedraft.engines.vllm.v2.trees import Trees

logger = logging.getLogger(__name__)


def trees_of(vllm_config: Any, device: torch.device, req_states: Any) -> Trees | None:
    """The trees of a runner; None where its method drafts none, or is told not to."""
    ours = configured(vllm_config)
    if ours.options.get("shape", "chain") == "chain":
        return None
    if missing := check(V2_TREE_HOOKS):
        logger.warning("freedraft: method '%s': drafts are chains: vLLM lacks %s", ours.name, "; ".join(missing))
        return None
    from freedraft.engines.vllm.v2.trees import Trees

    return Trees(vllm_config, device, req_states)


class MethodSpeculator(BaseSpeculator):
    """Drafts by a method on the host. B requests, K = most draft tokens of a request. vllm_config: vLLM's VllmConfig;
    device: of the model; req_states: the runner's RequestState. Raises ValueError: the method cannot work, which stops
    the start."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any) -> None:
        from vllm.distributed import get_tp_group

        share_logging()
        self._vllm_config, self._states, self._ranks = vllm_config, req_states, get_tp_group()
        config, ours = vllm_config.speculative_config, configured(vllm_config)
        self.length: int = config.num_speculative_tokens
        self._schedule = getattr(config, SCHEDULE)
        if ours.lengths:  # until `prepare`, so that vLLM lists CUDA graphs for each of them, when it profiles and later
            setattr(config, SCHEDULE, GraphLengths(ours.lengths))
        self.max_model_len: int = vllm_config.model_config.max_model_len
        slots: int = req_states.max_num_reqs
        # vLLM has the tokens of all requests on the device for its own n-grams, which read them; ours do not.
        tokens = req_states.all_token_ids
        req_states.all_token_ids = StagedWriteTensor(
            tuple(tokens.gpu.shape), tokens.dtype, device, uva_instead_of_gpu=True
        )
        self.guarded: GuardedMethod | None = None  # in rank 0
        self.runner: Any = None  # once it has its KV cache
        self.draft_model: PagedDraftModel | None = None
        self.lengths: BatchLengths | None = None  # learnt while serving
        self.rows: Rows = []  # of them, what the scheduler is to know
        if self._ranks.rank_in_group == 0:
            spec = METHODS[ours.name]
            context = context_of_engine(vllm_config, v2_lengths=ours.lengths or (self.length,))
            self.guarded = GuardedMethod(spec, spec.option_type.parse(ours.options), context)
            controller = self.guarded.method.controller
            self.lengths = controller if isinstance(controller, BatchLengths) else None
        learns = self.guarded is not None and self.guarded.method.learns
        tokenizer = tokenizer_of(vllm_config.model_config) if learns else None
        self.requests = Requests(slots, self.max_model_len, self.length, tokenizer)
        self.trees = trees_of(vllm_config, device, req_states)
        self._parts = 1 if self.trees is None else 2  # tokens, and masks of what they follow
        self._drafts = torch.zeros(self._parts * slots * self.length, dtype=torch.int64, device=device)
        self._gained = [GainedTokens(slots, self.length, device) for _ in range(2)]  # by the newest step, the last one
        self.logits = LogitsCopy()
        self.events = None if self.guarded is None else RequestEvents(self.guarded, self.requests, req_states)
        self._pending = False  # whether the newest step's tokens are still to be taken
        self._taken: tuple[NDArray[np.intp], NDArray[np.int32]] | None = None  # see `_take`; not recorded yet
        self._awaited: tuple[torch.Tensor, int] | None = None  # slots, and most draft tokens of each, until `join`
        self.joins_at_once, self.joins_last = True, False  # until there is a runner
        self.verifying: Any = None  # vLLM's InputBatch, once its inputs are there
        self.warming_up = False  # see `warm_up`
        self._steps, self._drafted_at = 0, -1
        pinned = device.type != "cpu"
        self._proposed = torch.zeros(len(self._drafts), dtype=torch.int64, pin_memory=pinned)
        self.confidences: Confidences | None = None
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
        self.guarded = self.events = self.runner = self.draft_model = self.trees = None

    def warm_up(self, now: bool) -> None:
        """Whether vLLM makes up requests now, to compile kernels; their outcomes say nothing."""
        self.warming_up = now
        if self.trees is not None:
            self.trees.warm_up(now)

    def verify_adaptively(self, device: torch.device) -> None:
        """Give vLLM's adaptive verification what it asks for: confidences, by these names."""
        self.confidences = Confidences(self.requests.lengths.size, self.length, device)
        self.joins_at_once = True  # vLLM reads them before inputs are prepared
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
                logger.warning(
                    "freedraft: method '%s': the tokens of a seed are not those without drafts: vLLM lacks %s",
                    name,
                    "; ".join(missing),
                )
        if self.trees is not None and not DraftRanks(self._ranks).agree(self.trees.prepare(runner)):
            self.trees, self._parts = None, 1
        if self.trees is not None and self.lengths is not None:
            self.lengths.yields = TreeYields(self.length)
        self.runner = runner
        # vLLM sends drafts on, cuts its inputs in parts, or reads confidences.
        others = runner.pp_handler, runner.pcp_manager, self.confidences
        self.joins_at_once = any(other is not None for other in others)
        # Whether nothing but the model itself reads drafts.
        usual = type(runner.model_state).prepare_inputs is DefaultModelState.prepare_inputs
        readers = self.trees is not None, METHODS[name].runs_model, runner.uses_inputs_embeds, runner.ubatch_runner
        self.joins_last = usual and not any(readers)
        if not METHODS[name].runs_model:
            return
        # Told of no pass until all ranks can follow.
        try:
            self.draft_model = model = DraftRanks(self._ranks).ready(
                lambda: PagedDraftModel(runner, Backbone.of(runner.model), self._vllm_config)
            )
        except UnsupportedModel:
            raise
        except Exception:  # a vLLM that is built otherwise; all ranks go without
            logger.exception("freedraft: draft passes could not be built, so none are run; please report this")
            return
        if (guarded := self.guarded) is None:
            model.follow()
            return
        with model.ranks.leading():
            guarded.prepare(model)

    # -- requests ------------------------------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Look at the newest step, and at what has happened to requests since, now."""
        if self.guarded is not None:
            self.guarded.call(self._catch_up)

    # -- steps ---------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,
        slot_mappings: Any,
        last_hidden_states: torch.Tensor,
        aux_hidden_states: Any,
        num_sampled: torch.Tensor,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        *args: Any,
        dummy_run: bool = False,
        is_profile: bool = False,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
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
                self._gained[0].copy(input_batch, num_sampled, self._states, self._steps, drafts)
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
            none = np.zeros(0, np.intp)
            pages = V2StepState(self.runner.block_tables, self._states, none).pages
            self.draft_model.follow(pages)
        if self._ranks.world_size > 1:
            self._ranks.broadcast(packed, src=0)
            if confidences is not None:
                self._ranks.broadcast(confidences.device[: len(slots)], src=0)
        if self.trees is not None:
            self.trees.put(slots, packed[1])
        if batch is not None:  # where others have got slots meanwhile, these have no drafts yet, and read none
            self._states.draft_tokens[slots] = packed[0]
            combine_sampled_and_draft_tokens(
                self.runner.input_buffers.input_ids,
                batch.idx_mapping,
                self._states.last_sampled_tokens,
                batch.query_start_loc,
                batch.seq_lens,
                self._states.prefill_len.gpu,
                self._states.draft_tokens,
                batch.cu_num_logits,
                len(batch.logits_indices),
            )

    def _of_batch(self, buffer: torch.Tensor, batch: int) -> torch.Tensor:
        """int64 [1 or 2, B, K], contiguous: draft tokens, and masks where there are trees."""
        return buffer[: self._parts * batch * self.length].view(self._parts, batch, self.length)

    def _launch(
        self,
        input_batch: Any,
        num_sampled: torch.Tensor,
        drafts: torch.Tensor,
        hidden_states: torch.Tensor,
        over: NDArray[np.bool_],
    ) -> bool:
        """Ask for what a step gains, behind its own work, and fill `drafts`, int64 [B, K], with each request's newest
        token. over: bool [B], whose prompts are over."""
        self._catch_up()
        self._gained.reverse()
        self._gained[0].copy(input_batch, num_sampled, self._states, self._steps, drafts)
        self._pending = True
        self._set_prompt_states(input_batch, hidden_states, over)
        return True

    def _draft(self, most: int, batch: Any) -> bool:
        """Draft behind the newest step, at most so many tokens for each request, and where there is an InputBatch no
        more than it verifies; whether there may be drafts, of which `_proposed` is full then."""
        assert self.guarded is not None
        gained, requests = self._gained[0], self.requests
        room = self._room(gained.slots, requests.lengths[gained.slots] + 1, most)  # at most: they gain one, or nothing
        if batch is not None:
            verified = np.zeros(len(requests.lengths), np.int32)
            if (counts := batch.num_draft_tokens_per_req) is not None:
                verified[batch.idx_mapping_np[: batch.num_reqs]] = counts[: batch.num_reqs]
            room = np.minimum(room, verified[gained.slots])
        if not self._pending or not room.any():  # nobody has to wait
            return False
        rows, drafted = self._take()
        if not (drafting := room[rows] > 0).all():  # vLLM may have given their slots and pages to others since
            self.guarded.observe(replace(self._step(rows[~drafting], drafted[~drafting], 0), engine=None))
            rows, drafted = rows[drafting], drafted[drafting]
        proposed = self._of_batch(self._proposed, len(gained.slots)).numpy()
        proposed[0], proposed[1:] = gained.wait()[:, -1:], 0
        if len(rows):
            self._drafted_at = self._steps
            step, slots = self._step(rows, drafted, most), gained.slots[rows]
            draft = self.guarded.draft(step)
            branching = self._branching(slots)
            counts = write_drafts(draft, step.capacities, rows, branching, proposed, requests.parents, slots)
            requests.drafted[slots], requests.drafted_behind[slots] = counts, self._steps
            requests.nodes[slots, 0], requests.nodes[slots, 1:] = step.roots, proposed[0, rows]
            if self.confidences is not None:
                self.confidences.estimate(step, draft, rows, counts, len(gained.slots))
        proposed[0, :, most:] = -1  # as vLLM has it
        return True

    def _take(self) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
        """Take the newest step's tokens. Returns intp [R], the rows of those who gained some; int32 [R], how many draft
        tokens of ours each verified."""
        gained, self._pending = self._gained[0], False
        rows = gained.append_to(self.requests)
        if self.guarded is not None and (logits := self.logits.take()) is not None:
            self.guarded.recycle(logits)
        slots = gained.slots[rows]
        drafted = np.minimum(self.requests.drafted[slots], gained.scheduled[rows]).astype(np.int32)
        self.requests.drafted[slots] = 0
        self._taken = rows, drafted
        return self._taken

    def _record(self, rows: NDArray[np.intp], drafted: NDArray[np.int32]) -> None:
        """Learn from the step that was taken last how much to draft."""
        assert self.lengths is not None
        gained, before = self._gained
        tokens = gained.wait()
        if gained.query_tokens and before.number == gained.number - 1:
            seconds, context = gained.seconds_since(before), float(tokens[:, 1].mean())
            self.lengths.record_step(len(tokens), gained.query_tokens, context, seconds)
        if gained.scheduled.any():
            self.lengths.yields.record(gained.scheduled[rows], np.minimum(tokens[rows, 0] - 1, drafted))

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

    def _recycle(self, logits: torch.Tensor, input_batch: Any) -> None:
        """What the target says behind each root, which the host knows where it has drafted behind the last step, and
        behind each draft token of ours that a step verifies."""
        slots, scheduled = input_batch.idx_mapping_np[: input_batch.num_reqs], input_batch.num_draft_tokens_per_req
        lengths = np.minimum(self.requests.drafted[slots], scheduled[: len(slots)]).astype(np.int64)
        known = self.requests.drafted_behind[slots] == self._steps
        if self.events:
            known &= ~self.events.of_others(slots)
        rows, first = np.flatnonzero(known), input_batch.cu_num_logits_np
        if len(rows) and len(logits) == first[len(slots)]:
            request_ids = [input_batch.req_ids[row] for row in rows.tolist()]
            nodes, parents = self.requests.nodes[slots[rows]], self.requests.parents[slots[rows]]
            self.logits.put_nodes(request_ids, nodes, lengths[rows], first[rows].astype(np.int64), logits, parents)

    def _catch_up(self) -> None:
        """Take the tokens of a step that was not drafted for, then what has happened to requests since."""
        assert self.guarded is not None and self.events is not None
        if self._pending and len((taken := self._take())[0]):
            step = self._step(*taken, 0)
            # vLLM may have given their slots and pages to others since.
            self.guarded.observe(replace(step, engine=None) if self.events else step)
        if self._taken is not None and self.lengths is not None:
            self._record(*self._taken)
        self._taken = None
        self.events.look()

    def _set_prompt_states(self, input_batch: Any, hidden_states: torch.Tensor, over: NDArray[np.bool_]) -> None:
        """Hand on the hidden states behind the prompts that this step has ended; over: bool [B], prompts that are."""
        assert self.guarded is not None and self.events is not None
        for row in np.flatnonzero(over).tolist() if self.events.in_prompt else ():
            if (request_id := input_batch.req_ids[row]) in self.events.in_prompt:
                self.events.in_prompt.remove(request_id)
                # Behind the prompt's last token there may be placeholders for draft tokens.
                drafts = input_batch.num_draft_tokens_per_req
                after = 0 if drafts is None else int(drafts[row])
                state = hidden_states[int(input_batch.query_start_loc_np[row + 1]) - 1 - after]
                self.guarded.set_prompt_state(request_id, state.float().cpu().numpy())

    def _decide(self, batch: int) -> Rows:
        assert self.lengths is not None
        slots = self._gained[0].slots
        context = float(self.requests.lengths[slots].mean()) if len(slots) else 1.0
        return self.lengths.decide(batch, max(context, 1.0))

    def _branching(self, slots: NDArray[np.int32]) -> NDArray[np.bool_] | None:
        """bool [R], which requests may have trees; None where nobody may."""
        return None if self.trees is None else self.trees.allowed[slots]

    def _room(self, slots: NDArray[np.int32], contexts: NDArray[np.int64], most: int) -> NDArray[np.int32]:
        return self.requests.room(slots, contexts, most, self._branching(slots))

    def _step(self, rows: NDArray[np.intp], drafted: NDArray[np.int32], most: int) -> Step:
        """The newest step, of these requests, who may have so many draft tokens now; drafted: as `_take` says."""
        gained = self._gained[0]
        known, slots = gained.wait(), gained.slots[rows]
        contexts = known[rows, 1].astype(np.int32)
        ends = slots.astype(np.int64) * self.max_model_len + contexts
        tokens = self.requests.tokens
        state = None
        if self.runner is not None:
            state = V2StepState(self.runner.block_tables, self._states, slots.astype(np.intp))
        # For clocks of the method's own: not where the step before was not drafted for, or this one is looked at later.
        on_time = most > 0 and self._drafted_at == gained.number - 1
        timed = on_time and gained.query_tokens and len(rows) == len(gained.slots)
        return Step(
            request_ids=[gained.request_ids[row] for row in rows.tolist()],
            tokens=tokens.reshape(-1),
            starts=ends - known[rows, 0],
            ends=ends,
            contexts=contexts,
            capacities=self._room(slots, contexts, most),
            drafted=drafted,
            widths=None,
            previous=(len(rows), gained.query_tokens) if timed else None,
            history=lambda b: tokens[slots[b], : contexts[b]],
            trees=self.trees is not None and self.trees.enabled,
            engine=state,
        )
