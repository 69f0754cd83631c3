"""`MethodProposer` and the hook in vLLM's model runner: how a `Method` of ours sees requests and steps.

vLLM's custom proposers get neither request ids nor the scheduled number of draft tokens, and do not hear when a request
ends; the hook tells ours.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freedraft.draft import DraftBatch
from freedraft.engines.draft_ranks import DraftRanks
from freedraft.engines.hooks import check
from freedraft.engines.vllm.configured import configured
from freedraft.engines.vllm.context import context_of_engine, tokenizer_of
from freedraft.engines.vllm.draft_model import PagedDraftModel
from freedraft.engines.vllm.graph_memory import passes_on_all_ranks, with_draft_graphs
from freedraft.engines.vllm.hooks import DRAFT_GRAPH_HOOKS, GRAPH_HOOKS, PROCESSOR_HOOKS
from freedraft.engines.vllm.kept_layers import Backbone
from freedraft.engines.vllm.outputs import longest_answer, output_of
from freedraft.engines.vllm.pages import Pages
from freedraft.engines.vllm.patching import share_logging, with_kv_cache, wrap_once
from freedraft.engines.vllm.start_line import start_line
from freedraft.engines.vllm.tenants import SALT
from freedraft.engines.vllm.v1.full_graphs import prefer_full_graphs
from freedraft.engines.vllm.v1.matching import Matching
from freedraft.guarded_method import GuardedMethod
from freedraft.method import METHODS
from freedraft.step import Step

logger = logging.getLogger(__name__)


class V1StepState(NamedTuple):
    """See `StepState`. arguments: what vLLM passed to `propose_draft_token_ids`, by name (common_attn_metadata, ...);
    rows: intp [B], rows of vLLM's batch that the step's requests have."""

    runner: Any
    arguments: dict[str, Any]
    rows: NDArray[np.intp]

    def pages(self) -> Pages:
        table = self.runner.input_batch.block_table[0]
        blocks = table.num_blocks_per_row[self.rows].astype(np.int64)
        return Pages(self.arguments["common_attn_metadata"].block_table_tensor, self.rows, blocks, table.block_size)

    def prompt_lengths(self) -> NDArray[Any]:
        lengths: NDArray[Any] = self.runner.input_batch.num_prompt_tokens[self.rows]
        return lengths


class MethodProposer:
    """The proposer that vLLM creates for every method of ours. Of the drafts of tensor-parallel ranks it takes those of
    the first, so the others make none, and only do its draft passes with it. Raises ValueError: the method cannot work,
    which stops the start."""

    def __init__(self, vllm_config: Any) -> None:
        from vllm.distributed import get_tp_group

        share_logging()
        install()
        ours = configured(vllm_config)
        self.spec = METHODS[ours.name]
        if not ours.graph_mode_given and not check(GRAPH_HOOKS):
            prefer_full_graphs(vllm_config.compilation_config)
        self.drafts = get_tp_group().rank_in_group == 0
        self.vllm_config = vllm_config
        self.backbone: Backbone | None = None
        self.draft_model: PagedDraftModel | None = None
        # Requests whose prompt is not over, where the method wants the hidden states behind prompts.
        self.in_prompt: set[str] = set()
        self.without_text: set[str] = set()  # requests with embeddings for a prompt
        self.longest_answers: dict[str, int] = {}  # tokens of output that each request may have
        if self.drafts:
            options = self.spec.option_type.parse(ours.options)
            self.guarded = GuardedMethod(self.spec, options, context_of_engine(vllm_config))
            self.tokenizer = tokenizer_of(vllm_config.model_config) if self.guarded.method.learns else None

    def load_model(self, target_model: Any) -> None:
        """vLLM has loaded the target. Raises UnsupportedModel, which stops the start."""
        if self.spec.runs_model:
            self.backbone = Backbone.of(target_model)

    def close(self) -> None:
        """The engine ends; the process may go on, and is to have its memory back."""
        if self.drafts:
            self.guarded.close()
        self.backbone = self.draft_model = None

    def prepare(self, runner: Any) -> None:
        """The KV cache of vLLM's GPUModelRunner is there; requests come next."""
        from vllm.distributed import get_tp_group

        # Told of no pass until all ranks can follow.
        self.draft_model = model = DraftRanks(get_tp_group()).ready(lambda: self._make_draft_model(runner))
        if model is None:
            return
        if not self.drafts:
            model.follow()
            return
        with model.ranks.leading():
            self.guarded.prepare(model)

    def _make_draft_model(self, runner: Any) -> PagedDraftModel | None:
        if self.drafts:
            logger.info(start_line(self.vllm_config, self.spec.name, v2=False))
        return None if self.backbone is None else PagedDraftModel(runner, self.backbone, self.vllm_config)

    def begin(self, batch: Any, requests: Sequence[Any]) -> None:
        """vLLM's NewRequestData have their first step, in its InputBatch."""
        for request in requests:
            if getattr(request, "prompt_embeds", None) is not None:
                self.without_text.add(request.req_id)
                continue
            row = batch.req_id_to_index[request.req_id]
            tokens = batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]]
            self.longest_answers[request.req_id] = longest_answer(request.sampling_params)
            extra = getattr(request.sampling_params, "extra_args", None)
            self.guarded.begin(request.req_id, tokens, getattr(request, SALT, None) or None, extra)
            if self.guarded.needs_prompt_states:
                self.in_prompt.add(request.req_id)

    def draft(self, runner: Any, arguments: dict[str, Any]) -> list[list[int]]:
        """Draft tokens by row of the batch: none for requests that are in the midst of their prompt."""
        config = runner.speculative_config
        step = make_step(
            runner.input_batch,
            arguments,
            V1StepState(runner, arguments, self._rows_of_text(runner.input_batch, arguments["sampled_token_ids"])),
            max_draft_tokens=config.num_speculative_tokens,
            max_model_len=runner.max_model_len,
            longest_answers=self.longest_answers,
        )
        if not self.in_prompt.isdisjoint(step.request_ids):
            self._set_prompt_states(step)
        return draft_lists(self.guarded.draft(step), step, len(arguments["sampled_token_ids"]))

    def _rows_of_text(self, batch: Any, sampled: Sequence[Sequence[int]]) -> NDArray[np.intp]:
        """Rows of the requests that have sampled a token, and whose tokens are known."""
        gained = np.fromiter(map(len, sampled), np.int64, len(sampled))
        if self.without_text:
            gained[[i in self.without_text for i in batch.req_ids[: len(gained)]]] = 0
        return np.flatnonzero(gained)

    def finish(self, request_ids: set[str], states: dict[str, Any]) -> None:
        """These requests have ended; `states`: vLLM's CachedRequestState by id, where it has one."""
        for request_id in request_ids:
            self.in_prompt.discard(request_id)
            self.longest_answers.pop(request_id, None)
            if request_id in self.without_text:
                self.without_text.remove(request_id)
                continue
            state = states.get(request_id)
            parameters, tokens = (state.sampling_params, state.output_token_ids) if state else (None, [])
            self.guarded.finish(request_id, output_of(parameters, tokens, self.tokenizer) if state else None)

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


def make_step(
    batch: Any,
    arguments: dict[str, Any],
    state: V1StepState,
    *,
    max_draft_tokens: int,
    max_model_len: int,
    longest_answers: Mapping[str, int],
) -> Step:
    """The `Step` behind a call of `propose_draft_token_ids`, of the requests in `state.rows` of vLLM's InputBatch.
    longest_answers: tokens that each may write."""
    rows, sampled, output = state.rows, arguments["sampled_token_ids"], arguments["scheduler_output"]
    gained = np.fromiter((len(sampled[row]) for row in rows.tolist()), np.int64, len(rows))
    request_ids: list[str] = [batch.req_ids[row] for row in rows.tolist()]
    contexts = batch.num_tokens_no_spec[rows].astype(np.int32)
    token_rows = batch.token_ids_cpu
    ends = rows * token_rows.shape[1] + contexts
    drafted = np.zeros(len(rows), np.int32)
    if scheduled := output.scheduled_spec_decode_tokens:
        tokens = [scheduled.get(request_id, ()) for request_id in request_ids]
        # The scheduler pads some with -1.
        drafted[:] = [len(draft) - draft.count(-1) for draft in tokens]
    schedulable = getattr(output, "num_spec_tokens_to_schedule", None)
    # The last token of a request comes after all drafts.
    ended = np.fromiter((longest_answers.get(i, max_model_len) for i in request_ids), np.int64, len(rows))
    ended = np.minimum(ended + batch.num_prompt_tokens[rows], max_model_len)
    capacities = np.minimum(
        max_draft_tokens if schedulable is None else min(max_draft_tokens, schedulable), ended - 1 - contexts
    )
    query_tokens = output.total_num_scheduled_tokens
    decoded_only = len(rows) == len(sampled) and query_tokens == len(rows) + drafted.sum()
    return Step(
        request_ids=request_ids,
        tokens=token_rows.reshape(-1),
        starts=ends - gained,
        ends=ends,
        contexts=contexts,
        capacities=capacities.clip(0).astype(np.int32),
        drafted=drafted,
        widths=None,
        previous=(len(rows), query_tokens) if decoded_only else None,
        history=lambda b: token_rows[rows[b], : contexts[b]],
        engine=state,
    )


def draft_lists(draft: DraftBatch | None, step: Step, batch_size: int) -> list[list[int]]:
    """Draft tokens by row of vLLM's batch, as vLLM wants them; draft: chains, None for none."""
    drafts: list[list[int]] = [[] for _ in range(batch_size)]
    if draft is not None:
        counts = np.minimum(draft.counts - 1, step.capacities).clip(0).tolist()
        for row, chain, count in zip(step.engine.rows.tolist(), draft.tokens[:, 1:].tolist(), counts, strict=True):
            drafts[row] = chain[:count]
    return drafts


def install() -> None:
    """Hook vLLM's model runner, once per process. Drafters of others see no difference."""
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    wrap_once(GPUModelRunner, "propose_draft_token_ids", _propose)
    wrap_once(GPUModelRunner, "_update_states", _update)
    if hasattr(GPUModelRunner, "shutdown"):
        wrap_once(GPUModelRunner, "shutdown", _shutdown)
    wrap_once(GPUModelRunner, "initialize_kv_cache", with_kv_cache(_prepare))
    if not check(PROCESSOR_HOOKS):
        wrap_once(gpu_model_runner, "build_logitsprocs", _build_processors)
    if not check(DRAFT_GRAPH_HOOKS):
        wrap_once(GPUModelRunner, "capture_model", _capture)
        if hasattr(GPUModelRunner, "profile_cudagraph_memory"):
            wrap_once(GPUModelRunner, "profile_cudagraph_memory", with_draft_graphs(_passes))


def _shutdown(original: Callable[..., Any]) -> Callable[..., Any]:
    def shutdown(self: Any) -> None:
        if isinstance(drafter := getattr(self, "drafter", None), MethodProposer):
            drafter.close()
        original(self)

    return shutdown


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
        drafts, model = None, drafter.draft_model
        if drafter.drafts:
            with nullcontext() if model is None else model.ranks.leading():
                drafts = drafter.guarded.call(lambda: drafter.draft(self, arguments))
        elif model is not None:
            none = np.zeros(0, np.intp)
            model.follow(V1StepState(self, arguments, none).pages)
        return drafts or [[] for _ in arguments["sampled_token_ids"]]

    return propose_draft_token_ids


def _update(original: Callable[..., Any]) -> Callable[..., Any]:
    def _update_states(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        drafter = getattr(self, "drafter", None)
        if not isinstance(drafter, MethodProposer):
            return original(self, scheduler_output, *args, **kwargs)
        # vLLM lets one request near max_model_len turn drafting off for the whole batch. Ours look at each by itself.
        self.effective_drafter_max_model_len = self.max_model_len + self.speculative_config.num_speculative_tokens + 1
        if not drafter.drafts:
            return original(self, scheduler_output, *args, **kwargs)
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


def _capture(original: Callable[..., Any]) -> Callable[..., Any]:
    def capture_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        if isinstance(drafter := self.drafter, MethodProposer) and (model := drafter.draft_model) is not None:
            model.capture(self.input_batch.block_table[0].max_num_blocks_per_req)
        return result

    return capture_model


def _build_processors(original: Callable[..., Any]) -> Callable[..., Any]:
    """Have all of vLLM's own processors of logits, of which its rejection sampler knows `min_tokens` alone."""

    def build_logitsprocs(
        vllm_config: Any, device: Any, is_pin_memory: bool, is_pooling_model: bool, custom_logitsprocs: Any = ()
    ) -> Any:
        from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors

        # Custom ones may read what has been written where drafts are not yet: vLLM refuses them.
        if custom_logitsprocs or configured(vllm_config).name not in METHODS:
            return original(vllm_config, device, is_pin_memory, is_pooling_model, custom_logitsprocs)
        return LogitsProcessors(made(vllm_config, device, is_pin_memory) for made in BUILTIN_LOGITS_PROCESSORS)

    return build_logitsprocs


def _passes(runner: Any) -> int | None:
    if not isinstance(drafter := getattr(runner, "drafter", None), MethodProposer):
        return None
    return passes_on_all_ranks(drafter.guarded.method if drafter.drafts else None)


def _prepare(runner: Any) -> None:
    if not isinstance(drafter := getattr(runner, "drafter", None), MethodProposer):
        return
    runner.rejection_sampler = Matching(runner.sampler)
    if drafter.drafts:
        drafter.guarded.call(lambda: drafter.prepare(runner))
        return
    try:
        drafter.prepare(runner)
    except Exception:
        logger.exception(
            "freedraft: this tensor-parallel rank could not build draft passes, so none are run; please report this"
        )
