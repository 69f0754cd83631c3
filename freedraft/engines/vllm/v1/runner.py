"""`MethodProposer` and the hook in vLLM's model runner: how a `Method` of ours sees requests and steps.

vLLM's custom proposers get neither request ids nor the scheduled number of draft tokens, and do not hear when a request
ends; the hook tells ours.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from freedraft.draft import DraftBatch
from freedraft.engines.hooks import check
from freedraft.engines.logits_copy import LogitsCopy
from freedraft.engines.vllm.context import context_of_engine
from freedraft.engines.vllm.fixes import apply_fixes
from freedraft.engines.vllm.hooks import LOGITS_HOOKS
from freedraft.engines.vllm.methods import configured
from freedraft.engines.vllm.outputs import output_of
from freedraft.engines.vllm.patching import share_logging, wrap_once
from freedraft.engines.vllm.tenants import SALT
from freedraft.engines.vllm.v1.draft_model import PagedDraftModel, StepState
from freedraft.engines.vllm.v1.kept_layers import Backbone
from freedraft.guarded_method import GuardedMethod
from freedraft.method import METHODS, Step


class MethodProposer:
    """The proposer that vLLM creates for every method of ours.

    Raises:
        ValueError: the method cannot work, which stops the start.
    """

    def __init__(self, vllm_config: Any) -> None:
        share_logging()
        install()
        apply_fixes(early=False)
        name, options = configured(vllm_config)
        self.spec = METHODS[name]
        self.guarded = GuardedMethod(self.spec, self.spec.option_type.parse(options), context_of_engine(vllm_config))
        self.vllm_config = vllm_config
        self.backbone: Backbone | None = None
        # Requests whose prompt is not over, where the method wants the hidden states behind prompts.
        self.in_prompt: set[str] = set()
        self.drafted: dict[str, list[int]] = {}  # of the requests that the last step decoded
        self.logits = LogitsCopy()

    def load_model(self, target_model: Any) -> None:
        """vLLM has loaded the target. Raises UnsupportedModel, which stops the start."""
        if self.spec.runs_model:
            self.backbone = Backbone.of(target_model)

    def prepare(self, runner: Any) -> None:
        """The KV cache of vLLM's GPUModelRunner is there; requests come next."""
        if self.backbone is not None:
            self.guarded.prepare(PagedDraftModel(runner, self.backbone, self.vllm_config))

    def begin(self, batch: Any, requests: Sequence[Any]) -> None:
        """vLLM's NewRequestData have their first step, in its InputBatch."""
        for request in requests:
            row = batch.req_id_to_index[request.req_id]
            tokens = batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]]
            extra = getattr(request.sampling_params, "extra_args", None)
            self.guarded.begin(request.req_id, tokens, getattr(request, SALT, None) or None, extra)
            if self.guarded.needs_prompt_states:
                self.in_prompt.add(request.req_id)

    def draft(self, runner: Any, arguments: dict[str, Any]) -> list[list[int]]:
        """Draft tokens by row of the batch: none for requests that are in the midst of their prompt."""
        step = make_step(runner, arguments)
        if not self.in_prompt.isdisjoint(step.request_ids):
            self._set_prompt_states(step)
        if (logits := self.logits.take()) is not None:
            self.guarded.recycle(logits)
        drafts = draft_lists(self.guarded.draft(step), step, len(arguments["sampled_token_ids"]))
        self.drafted = {i: drafts[row] for i, row in zip(step.request_ids, step.engine.rows.tolist(), strict=True)}
        return drafts

    def take_logits(self, batch: Any, logits: Any, metadata: Any) -> None:
        """What the target says behind each root and draft token that a step verifies.

        Args:
            batch: vLLM's InputBatch, B rows; metadata: its SpecDecodeMetadata, None for a step without drafts.
            logits: float [R, V], those of a row of the batch behind each other.
        """
        number = np.array(metadata.num_draft_tokens if metadata is not None else [0] * batch.num_reqs, np.int64)
        rows = [row for row, request_id in enumerate(batch.req_ids) if request_id in self.drafted]
        if not rows or len(logits) != number.sum() + len(number):
            return
        chains = DraftBatch.empty(len(rows), int(number[rows].max()) + 1)
        width = chains.max_nodes
        chains.parents[:], chains.depths[:] = np.arange(-1, width - 1), np.arange(width)
        chains.counts[:] = number[rows] + 1
        first = np.cumsum(number + 1) - number - 1
        for b, row in enumerate(rows):
            chains.tokens[b, 0] = batch.token_ids_cpu[row, batch.num_tokens_no_spec[row] - 1]
            draft = self.drafted[batch.req_ids[row]][: number[row]]
            chains.tokens[b, 1 : 1 + len(draft)] = draft
            chains.counts[b] = 1 + len(draft)
        of_row = [
            (first[row] + np.arange(n), b * width + np.arange(n))
            for b, (row, n) in enumerate(zip(rows, chains.counts, strict=True))
        ]
        nodes = np.concatenate([source for source, _ in of_row]), np.concatenate([target for _, target in of_row])
        self.logits.put([batch.req_ids[row] for row in rows], chains, logits, nodes)

    def finish(self, request_ids: set[str], states: dict[str, Any]) -> None:
        """These requests have ended; `states`: vLLM's CachedRequestState by id, where it has one."""
        # A set's order differs between processes, and all tensor-parallel ranks must learn in the same one.
        for request_id in sorted(request_ids):
            self.in_prompt.discard(request_id)
            state = states.get(request_id)
            output = None if state is None else output_of(state.sampling_params, state.output_token_ids)
            self.guarded.finish(request_id, output)

    def _set_prompt_states(self, step: Step) -> None:
        """Hand on the hidden states behind the prompts that this step has ended."""
        new = [i for i, request_id in enumerate(step.request_ids) if request_id in self.in_prompt]
        arguments = step.engine.arguments
        # The last token of each row that this step computed.
        ends = arguments["common_attn_metadata"].query_start_loc_cpu[step.engine.rows[new] + 1] - 1
        hidden = arguments["hidden_states"]
        states = hidden[ends.to(hidden.device)].float().cpu().numpy()
        for i, state in zip(new, states, strict=True):
            self.in_prompt.remove(step.request_ids[i])
            self.guarded.set_prompt_state(step.request_ids[i], state)

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """vLLM wants proposers to have it; the hook takes its place."""
        raise RuntimeError("freedraft's hook in vLLM's model runner is not in place: run 'freedraft doctor'")


def make_step(runner: Any, arguments: dict[str, Any]) -> Step:
    """The `Step` behind a call of `propose_draft_token_ids`, of the requests that have sampled a token."""
    batch, sampled, output = runner.input_batch, arguments["sampled_token_ids"], arguments["scheduler_output"]
    gained = np.fromiter(map(len, sampled), np.int64, len(sampled))
    rows = np.flatnonzero(gained)
    request_ids: list[str] = [batch.req_ids[row] for row in rows.tolist()]
    contexts = batch.num_tokens_no_spec[rows].astype(np.int32)
    token_rows = batch.token_ids_cpu
    ends = rows * token_rows.shape[1] + contexts
    drafted = np.zeros(len(rows), np.int32)
    if scheduled := output.scheduled_spec_decode_tokens:
        tokens = [scheduled.get(request_id, ()) for request_id in request_ids]
        # The scheduler pads some with -1.
        drafted[:] = [len(draft) - draft.count(-1) for draft in tokens]
    max_tokens = runner.speculative_config.num_speculative_tokens
    schedulable = getattr(output, "num_spec_tokens_to_schedule", None)
    # The last token that may be sampled is at max_model_len - 1, one beyond the drafts.
    capacities = np.minimum(
        max_tokens if schedulable is None else min(max_tokens, schedulable), runner.max_model_len - 1 - contexts
    )
    query_tokens = output.total_num_scheduled_tokens
    decoded_only = len(rows) == len(sampled) and query_tokens == len(rows) + drafted.sum()
    return Step(
        request_ids=request_ids,
        tokens=token_rows.reshape(-1),
        starts=ends - gained[rows],
        ends=ends,
        contexts=contexts,
        capacities=capacities.clip(0).astype(np.int32),
        drafted=drafted,
        widths=None,
        previous=(len(rows), query_tokens) if decoded_only else None,
        history=lambda b: token_rows[rows[b], : contexts[b]],
        engine=StepState(runner, arguments, rows),
    )


def draft_lists(draft: DraftBatch | None, step: Step, batch_size: int) -> list[list[int]]:
    """Chains as vLLM wants them: draft tokens by row of its batch."""
    drafts: list[list[int]] = [[] for _ in range(batch_size)]
    if draft is not None:
        counts = np.minimum(draft.counts - 1, step.capacities).clip(0).tolist()
        rows, tokens = step.engine.rows.tolist(), draft.tokens[:, 1:].tolist()
        for row, chain, count in zip(rows, tokens, counts, strict=True):
            drafts[row] = chain[:count]
    return drafts


def install() -> None:
    """Hook vLLM's model runner, once per process. Drafters of others see no difference."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    wrap_once(GPUModelRunner, "propose_draft_token_ids", _propose)
    wrap_once(GPUModelRunner, "_update_states", _update)
    if not check(LOGITS_HOOKS):
        wrap_once(GPUModelRunner, "_sample", _with_logits)
    if hasattr(GPUModelRunner, "initialize_kv_cache"):
        wrap_once(GPUModelRunner, "initialize_kv_cache", _initialize)


def _propose(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def propose_draft_token_ids(self: Any, *args: Any, **kwargs: Any) -> Any:
        drafter = self.drafter
        if not isinstance(drafter, MethodProposer):
            return original(self, *args, **kwargs)
        # What vLLM's own function does first.
        self._draft_probs = None
        self._draft_prob_req_ids = None
        arguments = signature.bind(self, *args, **kwargs).arguments
        drafts = drafter.guarded.call(lambda: drafter.draft(self, arguments))
        return drafts or [[] for _ in arguments["sampled_token_ids"]]

    return propose_draft_token_ids


def _update(original: Callable[..., Any]) -> Callable[..., Any]:
    def _update_states(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        drafter = getattr(self, "drafter", None)
        if not isinstance(drafter, MethodProposer):
            return original(self, scheduler_output, *args, **kwargs)
        # vLLM lets one request near max_model_len turn drafting off for the whole batch. Ours look at each by itself.
        self.effective_drafter_max_model_len = self.max_model_len + self.speculative_config.num_speculative_tokens + 1
        # vLLM calls this also for a step of no tokens, which it makes after the last request has ended.
        # An id that starts anew (resubmitted after an abort, streamed input) loses what was known of it.
        new, guarded = scheduler_output.scheduled_new_reqs, drafter.guarded
        ended = scheduler_output.finished_req_ids | ({request.req_id for request in new} & guarded.running)
        if ended:
            guarded.call(lambda: drafter.finish(ended, self.requests))
        result = original(self, scheduler_output, *args, **kwargs)
        if new:
            guarded.call(lambda: drafter.begin(self.input_batch, new))
        return result

    return _update_states


def _with_logits(original: Callable[..., Any]) -> Callable[..., Any]:
    def _sample(self: Any, logits: Any, spec_decode_metadata: Any, *args: Any, **kwargs: Any) -> Any:
        drafter = getattr(self, "drafter", None)
        if isinstance(drafter, MethodProposer) and logits is not None and drafter.guarded.needs_logits:
            drafter.guarded.call(lambda: drafter.take_logits(self.input_batch, logits, spec_decode_metadata))
        return original(self, logits, spec_decode_metadata, *args, **kwargs)

    return _sample


def _initialize(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    def initialize_kv_cache(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        drafter = getattr(self, "drafter", None)
        if isinstance(drafter, MethodProposer) and not signature.bind(self, *args, **kwargs).arguments.get(
            "is_profiling", False
        ):
            drafter.guarded.call(lambda: drafter.prepare(self))
        return result

    return initialize_kv_cache
