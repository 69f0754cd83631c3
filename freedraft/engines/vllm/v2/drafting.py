"""`HostDrafting`: requests and steps on the host, in the drafting rank."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from freedraft.cost.auto_by_batch import BatchLengths, Rows
from freedraft.engines.copies import LogitsCopy
from freedraft.engines.vllm.context import configured, context_of_engine, tokenizer_of
from freedraft.engines.vllm.forward import Pages
from freedraft.engines.vllm.outputs import SALT
from freedraft.engines.vllm.v2.requests import GainedTokens, Requests, Taken, write_drafts
from freedraft.guarded_method import GuardedMethod
from freedraft.method import METHODS
from freedraft.step import Step

if TYPE_CHECKING:
    from freedraft.engines.vllm.v2.rows_by_score import Confidences, RowsByScore


_ALL = 1 << 30  # requests: every batch


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
        return self.states.prompt_len.np[self.slots]


class HostDrafting:
    """The host's part of drafting, in the drafting rank. B requests, K = most draft tokens of a request.

    Args:
        device: of the model; states: the runner's RequestState; trees: see `Requests`.

    Attributes:
        proposed: int64 [slots, 1 or 2, K], the newest drafts: tokens, and ancestor masks if there may be trees.
        steps: number of the newest step; gained, before: its tokens, and those of the step before it.
    """

    proposed: NDArray[np.int64]

    def __init__(self, vllm_config: Any, device: torch.device, states: Any, trees: NDArray[np.bool_] | None) -> None:
        self._states, ours = states, configured(vllm_config)
        self._head = ours.head
        length: int = vllm_config.speculative_config.num_speculative_tokens
        spec, context = METHODS[ours.name], context_of_engine(vllm_config, v2_lengths=ours.lengths or (length,))
        self.guarded = GuardedMethod(spec, spec.options.parse(ours.options), context)
        method = self.guarded.method
        self.lengths = method.controller if isinstance(method.controller, BatchLengths) else None
        if self.lengths is not None:  # ranks that share experts all follow the probes of each
            self.lengths.probes.first *= vllm_config.parallel_config.data_parallel_size
            self.lengths.probes.longest *= vllm_config.parallel_config.data_parallel_size
        tokenizer = tokenizer_of(vllm_config.model_config) if method.learns else None
        longest = vllm_config.model_config.max_model_len
        self.requests = Requests(states.max_num_reqs, longest, length, tokenizer, trees)
        self.runner: Any = None  # once it has its KV cache, as the next one
        self.by_score: RowsByScore | Confidences | None = None  # with adaptive verification
        self.logits = LogitsCopy()
        self.gained, self.before = (GainedTokens(states.max_num_reqs, length, device) for _ in range(2))
        self.steps, self._drafted_at = 0, -1
        # Compile, or load from the cache, what steps call.
        self.requests.set_verified(self.gained, 0, None)
        nothing, proposed = self.requests.append(self.gained, 0), np.zeros((1, 1, length), np.int64)
        write_drafts(None, nothing, self.gained, self.requests, proposed, 0)

    # -- requests ------------------------------------------------------------------------------------------------------

    def add(self, request: Any) -> None:
        """Add a request (vLLM's NewRequestData) that got a slot: a new or resumed one."""
        request_id, parameters = request.req_id, request.sampling_params
        if request_id in self.requests.slots:  # an id that starts again: streamed input
            self.requests.finish(request_id)
        self.logits.forget(request_id)  # of its text before it ended or was preempted
        if request_id in self.requests.ended:
            self._tell_end(request_id)
        slot, tokens = self._states.req_id_to_index[request_id], request.prefill_token_ids
        self.proposed[slot] = 0  # no tree of the request that had the slot
        if getattr(request, "prompt_embeds", None) is None:  # tokens of prompt embeddings are unknown
            known = self.requests.add(request_id, slot, tokens, request.prompt_len, parameters)
            extra = getattr(parameters, "extra_args", None)
            self.guarded.begin(request_id, known, getattr(request, SALT, None) or None, extra)

    def _tell_end(self, request_id: str) -> None:
        self.guarded.finish(request_id, partial(self.requests.take_ended, request_id))

    # -- steps ---------------------------------------------------------------------------------------------------------

    def queue_copy(
        self, input_batch: Any, counts: tuple[torch.Tensor, torch.Tensor], drafts: torch.Tensor,
        hidden_states: torch.Tensor, over: NDArray[np.bool_],
    ) -> None:  # fmt: skip
        """Queue the copy of a step's accepted tokens after its work, and fill `drafts`, int64 [B, K], with each
        request's newest token. over: bool [B], requests that finished prefill."""
        self.gained, self.before = self.before, self.gained
        self.copy_gained(input_batch, counts, drafts)
        self.gained.taken = False
        self._set_prompt_states(input_batch, hidden_states, over)

    def copy_gained(self, input_batch: Any, counts: tuple[torch.Tensor, torch.Tensor], drafts: torch.Tensor) -> None:
        self.gained.copy(input_batch, counts, self._states, self.requests.generations, self.steps, drafts)

    def draft(self, most: int, batch: Any) -> bool:
        """Draft after the newest step, at most `most` tokens per request, and if there is an InputBatch no more than it
        verifies. Returns whether `proposed` was filled; on top of a head, with any n-gram."""
        gained, requests = self.gained, self.requests
        if gained.taken or not requests.set_verified(gained, most, batch):  # no wait is needed
            return False
        taken = self._take(most)
        step, draft = self._step(taken), None
        if self.by_score is not None:  # before the drafts that it learns from are overwritten
            self.by_score.acceptance.update(step)
        if step.most:
            self._drafted_at = self.steps
            draft = self.guarded.step(step)
        elif step.request_ids:
            self.guarded.step(step, "no room")
        counts = write_drafts(draft, taken, gained, requests, self.proposed, self.steps)
        if self.by_score is not None:
            self.by_score.choose(draft, gained.slots[taken.rows], counts, batch)
        if batch is None:  # requests may come and go before the next step is launched
            self.guarded.settle()
        return not self._head or bool(counts.any())

    def _take(self, most: int) -> Taken:
        """Take the newest step's tokens. most: draft tokens that each request may verify next."""
        self.gained.taken = True
        taken = self.requests.append(self.gained, most)
        if (k := self._head) and len(taken.rows):
            new = self.requests.tokens.reshape(-1), taken.starts, taken.ends
            ngrams = self.proposed[self.gained.slots[taken.rows], 0, :k]
            self.guarded.judge_head(new, ngrams, taken.drafted, self.gained.wait()[taken.rows, 1] >= k)
        return taken

    def recycle(self, logits: torch.Tensor, input_batch: Any) -> None:
        """Copy the logits at every node that the newest step verified, where we made the draft."""
        slots, scheduled = input_batch.idx_mapping_np[: input_batch.num_reqs], input_batch.num_draft_tokens_per_req
        lengths = np.minimum(self.requests.drafted[slots], scheduled[: len(slots)]).astype(np.int64)
        behind, first = self.requests.drafted_behind[slots], input_batch.cu_num_logits_np
        rows = np.flatnonzero(behind == self.steps - 1)
        if len(rows) and len(logits) == first[len(slots)]:
            request_ids = [input_batch.req_ids[row] for row in rows.tolist()]
            at, requests = slots[rows], self.requests
            nodes = np.column_stack((requests.roots[at], self.proposed[at, 0])).astype(np.int32)
            # Without the step's own tokens, which have not arrived.
            trees = nodes, requests.parents[at], lengths[rows], requests.lengths[at]
            self.logits.put_nodes(request_ids, trees, first[rows].astype(np.int64), logits)

    def catch_up(self) -> None:
        """Once step N is launched, close step N - 1: count, recycle, end requests, record its time; and take its tokens
        if nobody drafted after it."""
        self.guarded.settle()
        if (logits := self.logits.take()) is not None:
            with self.guarded:
                self.guarded.method.recycle(logits)
        if not self.gained.taken:
            self._learn(self._take(0))
        for request_id in [*self.requests.ended]:
            self._tell_end(request_id)
        if self.lengths is not None:
            gained, before = self.gained, self.before
            if gained.query_tokens and before.number == gained.number - 1:
                seconds, context = gained.seconds_since(before), float(gained.wait()[:, 2].mean())
                self.lengths.record_step(len(gained.slots), gained.query_tokens, context, seconds)
            gained.query_tokens = 0  # its time is recorded once

    def _learn(self, taken: Taken) -> None:
        """Learn from a step that nobody drafted after, at once or, in a rest, later."""
        if not len(taken.rows):
            return
        if self.by_score is not None:
            self.by_score.acceptance.update(self._step(taken, late=True))
        if (taken.ends - taken.starts == 1).all() and self.guarded.rests():
            self.gained.query_tokens = 0  # of the steps of a rest, one is timed
            newest = self.requests.tokens.reshape(-1)[taken.starts]
            self.guarded.keep(self._ids(taken), newest, taken.contexts)
        else:
            self.guarded.step(self._step(taken, late=True), "cost")
            self.guarded.settle()

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

    def decide(self, batch: int) -> Rows:
        """Return the draft lengths to schedule, none in a pause. batch: requests of the newest step."""
        if self.lengths is None:
            return []
        if self.guarded.paused:
            return [(1, _ALL, self._head)]
        slots = self.gained.slots
        context = float(self.requests.lengths[slots].sum()) / max(len(slots), 1)
        return self.lengths.decide(batch, max(context, 1.0))

    def _ids(self, taken: Taken) -> list[str]:
        ids = self.gained.request_ids
        return ids if len(taken.rows) == len(ids) else [ids[row] for row in taken.rows.tolist()]

    def _step(self, taken: Taken, *, late: bool = False) -> Step:
        """The newest step, for the requests that were taken. late: the next one has been launched."""
        gained, tokens = self.gained, self.requests.tokens
        everyone = len(taken.rows) == len(gained.slots)
        slots = gained.slots if everyone else gained.slots[taken.rows]
        ids, contexts = self._ids(taken), taken.contexts
        state = self.runner and V2StepState(self.runner.block_tables, self._states, slots)
        # For the method's own clock; unusable if the previous step was not drafted for.
        timed = not late and self._drafted_at == gained.number - 1 and gained.query_tokens and everyone
        return Step(
            ids, tokens.reshape(-1), taken.starts, taken.ends, contexts, taken.capacities, taken.drafted,
            previous=(len(ids), gained.query_tokens) if timed else None,
            history=lambda b: tokens[slots[b], : contexts[b]], trees=self.requests.trees[slots], engine=state,
        )  # fmt: skip
