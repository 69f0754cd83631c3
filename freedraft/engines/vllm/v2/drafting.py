"""`Drafting`: requests and steps on the host, in the drafting rank."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from freedraft.cost.auto_by_batch import BatchLengths, Rows
from freedraft.engines.hooks import check
from freedraft.engines.logits_copy import LogitsCopy
from freedraft.engines.vllm.configured import configured
from freedraft.engines.vllm.context import context_of_engine, tokenizer_of
from freedraft.engines.vllm.forward import Pages
from freedraft.engines.vllm.hooks import V2_TREE_HOOKS
from freedraft.engines.vllm.scheduler import SALT
from freedraft.engines.vllm.v2.gained import GainedTokens
from freedraft.engines.vllm.v2.gate import Gate
from freedraft.engines.vllm.v2.requests import Requests, Taken
from freedraft.engines.vllm.v2.write_drafts import write_drafts
from freedraft.guarded_method import GuardedMethod
from freedraft.method import METHODS
from freedraft.step import Step

if TYPE_CHECKING:
    from freedraft.engines.vllm.v2.rows_by_score import RowsByScore
    from freedraft.engines.vllm.v2.trees import Trees

logger = logging.getLogger(__name__)


class V2StepState(NamedTuple):
    """`Step.engine` on V2. block_tables: vLLM's BlockTables; states: its RequestState; slots: intp [B], of the step's
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


def trees_of(vllm_config: Any, device: torch.device, req_states: Any) -> Trees | None:
    """The trees of a runner; None if its method drafts chains."""
    ours = configured(vllm_config)
    if ours.shape == "chain":
        return None
    if missing := check(V2_TREE_HOOKS):
        lacks = "; ".join(missing)
        logger.warning("freedraft: method '%s': drafts are chains, not trees: vLLM lacks %s", ours.name, lacks)
        return None
    from freedraft.engines.vllm.v2.trees import Trees

    return Trees(vllm_config, device, req_states)


class Drafting:
    """The host part of a `MethodSpeculator`, with the same arguments. B requests, K = most draft tokens of a request.
    drafts: whether this rank drafts; other ranks have the buffers only."""

    def __init__(self, vllm_config: Any, device: torch.device, req_states: Any, *, drafts: bool) -> None:
        self._states, ours = req_states, configured(vllm_config)
        self.length: int = vllm_config.speculative_config.num_speculative_tokens
        self.max_model_len: int = vllm_config.model_config.max_model_len
        slots: int = req_states.max_num_reqs
        self.guarded: Any = None  # `GuardedMethod`, in the drafting rank
        self.lengths: BatchLengths | None = None  # learnt while serving
        self.rows: Rows = []  # draft lengths by batch size, to send to the scheduler
        self.by_score: RowsByScore | None = None  # with adaptive verification, once there is a runner
        tokenizer = None
        if drafts:
            spec = METHODS[ours.name]
            context = context_of_engine(vllm_config, v2_lengths=ours.lengths or (self.length,))
            self.guarded = GuardedMethod(spec, spec.options.parse(ours.options), context)
            controller, learns = self.guarded.method.controller, self.guarded.method.learns
            self.lengths = controller if isinstance(controller, BatchLengths) else None
            tokenizer = tokenizer_of(vllm_config.model_config) if learns else None
        self.requests = Requests(slots, self.max_model_len, self.length, tokenizer)
        self.runner: Any = None  # once it has its KV cache
        self.trees = trees_of(vllm_config, device, req_states)
        self.logits = LogitsCopy()
        self._gained = [GainedTokens(slots, self.length, device) for _ in range(2)]  # newest step, and the one before
        self._pending = False  # whether the newest step's tokens must still be taken
        self._steps, self._drafted_at = 0, -1
        self._parts = 1 if self.trees is None else 2  # tokens, and ancestor masks
        self._drafts = torch.zeros(self._parts * slots * self.length, dtype=torch.int64, device=device)
        self._proposed = torch.zeros(len(self._drafts), dtype=torch.int64, pin_memory=device.type != "cpu")
        self._proposed_np: NDArray[np.int64] = self._proposed.numpy()

    def _of_batch(self, buffer: torch.Tensor, batch: int) -> torch.Tensor:
        """int64 [1 or 2, B, K], contiguous: draft tokens, and masks if there are trees."""
        return buffer[: self._parts * batch * self.length].view(self._parts, batch, self.length)

    def _proposed_on_host(self, batch: int) -> NDArray[np.int64]:
        """`_of_batch` of the drafts on the host."""
        of_batch = self._proposed_np[: self._parts * batch * self.length]
        return of_batch.reshape(self._parts, batch, self.length)

    # -- requests ------------------------------------------------------------------------------------------------------

    def add(self, requests: Iterable[Any]) -> None:
        """Add requests (vLLM's NewRequestData) that got slots: new or resumed ones. A failure affects its request
        only."""
        for request in requests:
            self.guarded.call(partial(self._add, request))

    def _add(self, request: Any) -> None:
        request_id, parameters = request.req_id, request.sampling_params
        if request_id in self.requests.slots:  # an id that starts again: streamed input
            self.requests.finish(request_id)
        self.logits.forget(request_id)  # of its text before it ended or was preempted
        if request_id in self.requests.ended:
            self._tell_end(request_id)
        if getattr(request, "prompt_embeds", None) is None:  # tokens of prompt embeddings are unknown
            slot, tokens = self._states.req_id_to_index[request_id], request.prefill_token_ids
            known = self.requests.add(request_id, slot, tokens, request.prompt_len, parameters)
            extra = getattr(parameters, "extra_args", None)
            self.guarded.begin(request_id, known, getattr(request, SALT, None) or None, extra)

    def end(self, finished: Iterable[str], preempted: Iterable[str]) -> None:
        """Remove finished requests, and release the slots of preempted ones."""
        for request_id in preempted:
            self.requests.preempt(request_id)
        for request_id in finished:
            self.requests.finish(request_id)

    def _tell_end(self, request_id: str) -> None:
        output = self.guarded.call(partial(self.requests.take_ended, request_id))
        self.guarded.finish(request_id, output)

    # -- steps ---------------------------------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Take the newest step's tokens, without drafting."""
        self.guarded.call(self._catch_up)

    def _launch(
        self, input_batch: Any, num_sampled: torch.Tensor, drafts: torch.Tensor, hidden_states: torch.Tensor,
        over: NDArray[np.bool_],
    ) -> bool:  # fmt: skip
        """Queue the copy of a step's accepted tokens after its work, and fill `drafts`, int64 [B, K], with each
        request's newest token. over: bool [B], requests that finished prefill."""
        self._catch_up()
        self._gained.reverse()
        self._copy_gained(input_batch, num_sampled, drafts)
        self._pending = True
        self._set_prompt_states(input_batch, hidden_states, over)
        return True

    def _copy_gained(self, input_batch: Any, num_sampled: torch.Tensor, drafts: torch.Tensor) -> None:
        generations = self.requests.generations
        self._gained[0].copy(input_batch, num_sampled, self._states, generations, self._steps, drafts)

    def _draft(self, most: int, batch: Any, gate: Gate | None = None) -> bool:
        """Draft after the newest step, at most `most` tokens per request, and if there is an InputBatch no more than it
        verifies. Returns whether `_proposed` was filled, in time for the gate if there is one."""
        gained, requests = self._gained[0], self.requests
        if not (self._pending and requests.prepare(gained, most, batch)):  # no wait is needed
            return False
        taken = self._take()
        step, draft = self._step(taken), None
        if self.by_score is not None:  # before the drafts that it learns from are overwritten
            self.by_score.acceptance.update(step)
        if step.capacities.any():
            self._drafted_at = self._steps
            draft = self.guarded.draft(step, count=False)
        elif step.request_ids:
            self.guarded.take(step)
        proposed = self._proposed_on_host(len(gained.slots))
        with nullcontext(True) if gate is None else gate.writing() as in_time:
            if in_time:
                counts = write_drafts(draft, taken, gained, requests, proposed, self._branching, self._steps)
                proposed[0, :, most:] = -1  # as in vLLM
                if self.by_score is not None:
                    self.by_score.choose(draft, gained.slots[taken.rows], counts, batch)
        return in_time

    def _take(self) -> Taken:
        """Take the newest step's tokens."""
        self._pending = False
        return self.requests.append(self._gained[0], self._branching)

    def _record(self, lengths: BatchLengths) -> None:
        """Record the time of the last taken step, once."""
        gained, before = self._gained
        if gained.query_tokens and before.number == gained.number - 1:
            seconds, context = gained.seconds_since(before), float(gained.wait()[:, 1].mean())
            lengths.record_step(len(gained.slots), gained.query_tokens, context, seconds)
        gained.query_tokens = 0

    def _recycle(self, logits: torch.Tensor, input_batch: Any) -> None:
        """Copy the target's logits after each root and each of our draft tokens that the newest step verified, for
        requests that were drafted for after the step before."""
        slots, scheduled = input_batch.idx_mapping_np[: input_batch.num_reqs], input_batch.num_draft_tokens_per_req
        lengths = np.minimum(self.requests.drafted[slots], scheduled[: len(slots)]).astype(np.int64)
        behind, first = self.requests.drafted_behind[slots], input_batch.cu_num_logits_np
        rows = np.flatnonzero(behind == self._steps - 1)
        if len(rows) and len(logits) == first[len(slots)]:
            request_ids = [input_batch.req_ids[row] for row in rows.tolist()]
            nodes, parents = self.requests.nodes[slots[rows]], self.requests.parents[slots[rows]]
            contexts = self.requests.lengths[slots[rows]]  # the step's own tokens have not arrived
            trees = nodes, parents, lengths[rows], contexts
            self.logits.put_nodes(request_ids, trees, first[rows].astype(np.int64), logits)

    def _catch_up(self) -> None:
        """Do what need not precede the drafts of a step, once the next one has been launched: count, recycle, end
        requests, and take its tokens if nobody drafted after it."""
        self.guarded.count()
        if (logits := self.logits.take()) is not None:
            self.guarded.recycle(logits)
        if self._pending:
            self.requests.prepare(self._gained[0], 0, None)
            if (step := self._step(self._take())).request_ids:
                if self.by_score is not None:
                    self.by_score.acceptance.update(step)
                if (step.ends - step.starts == 1).all() and self.guarded.rests():
                    self._gained[0].query_tokens = 0  # of the steps of a pause, one is timed
                    self.guarded.rest(step.request_ids, step.tokens[step.starts], step.contexts)
                else:
                    self.guarded.observe(step)
        for request_id in [*self.requests.ended]:
            self._tell_end(request_id)
        if self.lengths is not None:
            self._record(self.lengths)

    def _set_prompt_states(self, input_batch: Any, hidden_states: torch.Tensor, over: NDArray[np.bool_]) -> None:
        """Pass on the prompt states of requests that finished prefill in this step; over: bool [B], which did."""
        ids = input_batch.req_ids
        waiting = self.guarded.in_prompt
        rows = [row for row in np.flatnonzero(over).tolist() if ids[row] in waiting] if waiting else []
        if rows:
            ends = input_batch.query_start_loc_np[1:][rows] - 1
            if (drafts := input_batch.num_draft_tokens_per_req) is not None:
                ends = ends - drafts[rows]  # placeholders for draft tokens may follow the prompt's last token
            self.guarded.set_prompt_states([ids[row] for row in rows], hidden_states[ends.tolist()])

    def _decide(self, batch: int) -> Rows:
        assert self.lengths is not None
        slots = self._gained[0].slots
        context = float(self.requests.lengths[slots].mean()) if len(slots) else 1.0
        return self.lengths.decide(batch, max(context, 1.0))

    @property
    def _branching(self) -> NDArray[np.bool_] | None:
        return None if self.trees is None else self.trees.allowed

    def _step(self, taken: Taken) -> Step:
        """The newest step, for the requests that were taken."""
        gained, tokens = self._gained[0], self.requests.tokens
        everyone, slots = len(taken.rows) == len(gained.slots), gained.slots
        ids, contexts, state = gained.request_ids, taken.contexts, None
        if not everyone:
            slots, ids = slots[taken.rows], [ids[row] for row in taken.rows.tolist()]
        if self.runner is not None:
            state = V2StepState(self.runner.block_tables, self._states, slots.astype(np.intp))
        # For the method's own clock; unusable if the previous step was not drafted for, or if this one is taken later.
        on_time = taken.capacities.any() and self._drafted_at == gained.number - 1
        timed = on_time and gained.query_tokens and everyone
        return Step(
            request_ids=ids,
            tokens=tokens.reshape(-1),
            starts=taken.starts,
            ends=taken.ends,
            contexts=contexts,
            capacities=taken.capacities,
            drafted=taken.drafted,
            widths=None,
            previous=(len(ids), gained.query_tokens) if timed else None,
            history=lambda b: tokens[slots[b], : contexts[b]],
            trees=(self.requests.no_trees if self._branching is None else self._branching)[slots],
            engine=state,
        )
