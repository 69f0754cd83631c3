"""`Drafting`: what the rank that drafts knows of requests and steps, on the host."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from freedraft.cost.batch_lengths import BatchLengths, Rows
from freedraft.engines.hooks import check
from freedraft.engines.logits_copy import LogitsCopy
from freedraft.engines.vllm.configured import configured
from freedraft.engines.vllm.context import context_of_engine, tokenizer_of
from freedraft.engines.vllm.hooks import V2_TREE_HOOKS
from freedraft.engines.vllm.v2.confidences import Confidences
from freedraft.engines.vllm.v2.events import RequestEvents
from freedraft.engines.vllm.v2.gained_tokens import GainedTokens
from freedraft.engines.vllm.v2.requests import Requests
from freedraft.engines.vllm.v2.step_state import V2StepState
from freedraft.engines.vllm.v2.write_drafts import write_drafts
from freedraft.guarded_method import GuardedMethod
from freedraft.method import METHODS
from freedraft.step import Step

if TYPE_CHECKING:
    from freedraft.engines.vllm.v2.trees import Trees

logger = logging.getLogger(__name__)


def trees_of(vllm_config: Any, device: torch.device, req_states: Any) -> Trees | None:
    """The trees of a runner; None where its method drafts chains."""
    ours = configured(vllm_config)
    if ours.options.get("shape", "chain") == "chain":
        return None
    if missing := check(V2_TREE_HOOKS):
        logger.warning("freedraft: method '%s': drafts are chains: vLLM lacks %s", ours.name, "; ".join(missing))
        return None
    from freedraft.engines.vllm.v2.trees import Trees

    return Trees(vllm_config, device, req_states)


class Drafting:
    """The host's part of a `MethodSpeculator`, whose arguments it has. B requests, K = most draft tokens of a request.
    drafts: whether this rank does; others have the buffers alone."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any, *, drafts: bool) -> None:
        self._states, ours = req_states, configured(vllm_config)
        self.length: int = vllm_config.speculative_config.num_speculative_tokens
        self.max_model_len: int = vllm_config.model_config.max_model_len
        slots: int = req_states.max_num_reqs
        self.guarded: GuardedMethod | None = None  # in rank 0
        self.lengths: BatchLengths | None = None  # learnt while serving
        self.rows: Rows = []  # of them, what the scheduler is to know
        if drafts:
            spec = METHODS[ours.name]
            context = context_of_engine(vllm_config, v2_lengths=ours.lengths or (self.length,))
            self.guarded = GuardedMethod(spec, spec.option_type.parse(ours.options), context)
            controller = self.guarded.method.controller
            self.lengths = controller if isinstance(controller, BatchLengths) else None
        learns = self.guarded is not None and self.guarded.method.learns
        tokenizer = tokenizer_of(vllm_config.model_config) if learns else None
        self.requests = Requests(slots, self.max_model_len, self.length, tokenizer)
        self.events = None if self.guarded is None else RequestEvents(self.guarded, self.requests, req_states)
        self.runner: Any = None  # once it has its KV cache
        self.trees = trees_of(vllm_config, device, req_states)
        self.confidences: Confidences | None = None
        self.logits = LogitsCopy()
        self._gained = [GainedTokens(slots, self.length, device) for _ in range(2)]  # by the newest step, the last one
        self._pending = False  # whether the newest step's tokens are still to be taken
        self._unrecorded = False  # whether the newest step was taken, and its time is still to be recorded
        self._steps, self._drafted_at = 0, -1
        self._parts = 1 if self.trees is None else 2  # tokens, and masks of what they follow
        self._drafts = torch.zeros(self._parts * slots * self.length, dtype=torch.int64, device=device)
        self._proposed = torch.zeros(len(self._drafts), dtype=torch.int64, pin_memory=device.type != "cpu")

    def _of_batch(self, buffer: torch.Tensor, batch: int) -> torch.Tensor:
        """int64 [1 or 2, B, K], contiguous: draft tokens, and masks where there are trees."""
        return buffer[: self._parts * batch * self.length].view(self._parts, batch, self.length)

    def catch_up(self) -> None:
        """Look at the newest step, and at what has happened to requests since, now."""
        if self.guarded is not None:
            self.guarded.call(self._catch_up)

    def _launch(
        self, input_batch: Any, num_sampled: torch.Tensor, drafts: torch.Tensor, hidden_states: torch.Tensor,
        over: NDArray[np.bool_],
    ) -> bool:  # fmt: skip
        """Ask for what a step gains, behind its own work, and fill `drafts`, int64 [B, K], with each request's newest
        token. over: bool [B], whose prompts are over."""
        self._catch_up()
        self._gained.reverse()
        self._gained[0].copy(input_batch, num_sampled, self._states, self._steps, drafts)
        self._pending = True
        self._set_prompt_states(input_batch, hidden_states, over)
        return True

    def _draft(self, most: int, batch: Any) -> bool:
        """Draft behind the newest step, at most `most` tokens for each request, and where there is an InputBatch no
        more than it verifies; whether there may be drafts, of which `_proposed` is full then."""
        assert self.guarded is not None
        gained, requests = self._gained[0], self.requests
        least = (requests.lengths[gained.slots] + 1).astype(np.int32)  # who gain nothing have no drafts, either
        room = requests.room(gained.slots, least, most, self._branching(gained.slots))
        if batch is not None:
            verified = np.zeros(len(requests.lengths), np.int32)
            if (counts := batch.num_draft_tokens_per_req) is not None:
                verified[batch.idx_mapping_np[: batch.num_reqs]] = counts[: batch.num_reqs]
            room = np.minimum(room, verified[gained.slots])
        if not self._pending or not room.any():  # nobody has to wait
            return False
        rows, drafted = self._take()
        if not (drafting := room[rows] > 0).all():  # vLLM may have given their slots and pages to others since
            self.guarded.take(replace(self._step(rows[~drafting], drafted[~drafting], 0), engine=None))
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
        self._unrecorded = True
        return rows, drafted

    def _record(self) -> None:
        """Learn the time of the step that was taken last."""
        assert self.lengths is not None
        gained, before = self._gained
        tokens = gained.wait()
        if gained.query_tokens and before.number == gained.number - 1:
            seconds, context = gained.seconds_since(before), float(tokens[:, 1].mean())
            self.lengths.record_step(len(tokens), gained.query_tokens, context, seconds)

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
        if self._unrecorded and self.lengths is not None:
            self._record()
        self._unrecorded = False
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

    def _step(self, rows: NDArray[np.intp], drafted: NDArray[np.int32], most: int) -> Step:
        """The newest step, of these requests, which may have `most` draft tokens; drafted: as `_take` says."""
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
            capacities=self.requests.room(slots, contexts, most, self._branching(slots)),
            drafted=drafted,
            widths=None,
            previous=(len(rows), gained.query_tokens) if timed else None,
            history=lambda b: tokens[slots[b], : contexts[b]],
            trees=self.trees is not None and self.trees.enabled,
            engine=state,
        )
