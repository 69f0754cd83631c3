"""`MethodProposer` and the hooks in vLLM's model runner V1: pass requests and steps to a `Method`.

vLLM's custom proposers get neither request ids nor scheduled draft tokens nor the ends of requests; the hooks add them.
"""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from freedraft.draft import DraftBatch
from freedraft.engines.vllm.context import configured, context_of_engine, start_line, tokenizer_of
from freedraft.engines.vllm.draft_graphs import with_draft_graphs
from freedraft.engines.vllm.draft_model import PagedDraftModel, prepare_passes
from freedraft.engines.vllm.forward import Pages
from freedraft.engines.vllm.outputs import SALT, drafted_up_to, trimmed_output
from freedraft.engines.vllm.patching import after, before, share_logging, signature_of, wrap_once
from freedraft.engines.vllm.v1.matching import Matching
from freedraft.guarded_method import GuardedMethod
from freedraft.method import METHODS
from freedraft.step import Step, room

logger = logging.getLogger(__name__)

_PREFERRED = "_freedraft_full_graphs"  # attribute of CompilationConfig


class V1StepState(NamedTuple):
    """`Step.engine` on V1. arguments: of `propose_draft_token_ids`, by name (common_attn_metadata, ...); rows: intp
    [B], the requests' rows of vLLM's batch."""

    runner: Any
    arguments: dict[str, Any]
    rows: NDArray[np.intp]

    def pages(self) -> Pages:
        table = self.runner.input_batch.block_table[0]
        blocks = table.num_blocks_per_row[self.rows].astype(np.int64)
        return Pages(self.arguments["common_attn_metadata"].block_table_tensor, self.rows, blocks, table.block_size)

    def prompt_lengths(self) -> NDArray[Any]:
        return self.runner.input_batch.num_prompt_tokens[self.rows]


class MethodProposer:
    """The proposer that vLLM creates for all our methods. vLLM takes the drafts of tensor-parallel rank 0, so the other
    ranks only run its draft passes with it. Raises ValueError, which stops the start: the method cannot work."""

    def __init__(self, vllm_config: Any) -> None:
        from vllm.distributed import get_tp_group

        share_logging()
        ours = configured(vllm_config)
        self.spec = METHODS[ours.name]
        install(self.spec.runs_model)
        if not ours.graph_mode_given:
            wrap_once(type(vllm_config.compilation_config), "resolve_cudagraph_mode_and_sizes", before(_prefer))
            setattr(vllm_config.compilation_config, _PREFERRED, True)
        self.vllm_config = vllm_config
        self.draft_model: PagedDraftModel | None = None
        # Maximum total tokens by request; requests with prompt embeddings are missing.
        self.limits: dict[str, int] = {}
        self.guarded: Any = None  # `GuardedMethod`, in the drafting rank
        if get_tp_group().rank_in_group == 0:
            options = self.spec.options.parse(ours.options)
            self.guarded = GuardedMethod(self.spec, options, context_of_engine(vllm_config))
            self.tokenizer = tokenizer_of(vllm_config.model_config) if self.guarded.method.learns else None

    def load_model(self, target_model: Any) -> None:
        """Required by vLLM; `prepare` comes later."""

    def close(self) -> None:
        """Release all memory: the process may outlive the engine."""
        if self.guarded is not None:
            self.guarded.close()
        self.draft_model = None

    def prepare(self, runner: Any) -> None:
        """Called once vLLM's GPUModelRunner has its KV cache, before requests. Raises UnsupportedModel: the model
        supports no draft passes."""
        if self.guarded is not None:
            logger.info(start_line(self.vllm_config, self.spec.name, v2=False))
        if self.spec.runs_model:
            self.draft_model = prepare_passes(runner, self.vllm_config, self.guarded)

    def begin(self, batch: Any, request: Any) -> None:
        """Add a request (vLLM's NewRequestData) at its first step in vLLM's InputBatch."""
        if getattr(request, "prompt_embeds", None) is not None:
            return
        row, parameters = batch.req_id_to_index[request.req_id], request.sampling_params
        tokens = batch.token_ids_cpu[row, : batch.num_tokens_no_spec[row]]
        self.limits[request.req_id] = drafted_up_to(parameters, int(batch.num_prompt_tokens[row]))
        extra = getattr(parameters, "extra_args", None)
        self.guarded.begin(request.req_id, tokens, getattr(request, SALT, None) or None, extra)

    def draft(self, runner: Any, arguments: dict[str, Any]) -> list[list[int]]:
        """Draft tokens by row of the batch; none for requests in prefill."""
        batch, sampled = runner.input_batch, arguments["sampled_token_ids"]
        ids = batch.req_ids[: len(sampled)]
        rows = [row for row, tokens in enumerate(sampled) if len(tokens) and ids[row] in self.limits]
        if len(rows) == len(ids) == arguments["scheduler_output"].total_num_scheduled_tokens and self.guarded.rests():
            self.guarded.keep(ids, np.array(sampled, np.int32).ravel(), batch.num_tokens_no_spec[: len(ids)].copy())
            return [[] for _ in ids]
        step = self._step(V1StepState(runner, arguments, np.array(rows, np.intp)))
        if not self.guarded.in_prompt.isdisjoint(step.request_ids):
            self._set_prompt_states(step)
        drafts = draft_lists(self.guarded.step(step), step, len(sampled))
        self.guarded.settle()
        return drafts

    def finish(self, request_ids: set[str], states: dict[str, Any]) -> None:
        """Remove requests. states: vLLM's CachedRequestState by id, if it has one."""
        for request_id in request_ids & self.limits.keys():
            del self.limits[request_id]
            state = states.get(request_id)
            made = () if state is None else (state.sampling_params, state.output_token_ids, self.tokenizer)
            self.guarded.finish(request_id, partial(trimmed_output, *made) if made else None)

    def _step(self, state: V1StepState) -> Step:
        runner, rows, output = state.runner, state.rows, state.arguments["scheduler_output"]
        batch, sampled = runner.input_batch, state.arguments["sampled_token_ids"]
        gained = np.fromiter((len(sampled[row]) for row in rows.tolist()), np.int64, len(rows))
        request_ids: list[str] = [batch.req_ids[row] for row in rows.tolist()]
        contexts = batch.num_tokens_no_spec[rows].astype(np.int32)
        token_rows = batch.token_ids_cpu
        ends = rows * token_rows.shape[1] + contexts
        drafted = np.zeros(len(rows), np.int32)
        if scheduled := output.scheduled_spec_decode_tokens:
            tokens = [scheduled.get(request_id, ()) for request_id in request_ids]
            # The scheduler may pad with -1.
            drafted[:] = [len(draft) - draft.count(-1) for draft in tokens]
        most = runner.speculative_config.num_speculative_tokens
        if (schedulable := getattr(output, "num_spec_tokens_to_schedule", None)) is not None:
            most = min(most, schedulable)
        limits = np.fromiter((self.limits[request_id] for request_id in request_ids), np.int64, len(rows))
        query_tokens = output.total_num_scheduled_tokens
        decoded_only = len(rows) == len(sampled) and query_tokens == len(rows) + drafted.sum()
        return Step(
            request_ids=request_ids,
            tokens=token_rows.reshape(-1),
            starts=ends - gained,
            ends=ends,
            contexts=contexts,
            capacities=room(np.minimum(limits, runner.max_model_len), contexts, most),
            drafted=drafted,
            previous=(len(rows), query_tokens) if decoded_only else None,
            history=lambda b: token_rows[rows[b], : contexts[b]],
            trees=np.zeros(len(rows), np.bool_),
            engine=state,
        )

    def _set_prompt_states(self, step: Step) -> None:
        new = [i for i, request_id in enumerate(step.request_ids) if request_id in self.guarded.in_prompt]
        arguments = step.engine.arguments
        # The last token of each row that this step computed.
        ends = arguments["common_attn_metadata"].query_start_loc_cpu[step.engine.rows[new] + 1] - 1
        hidden = arguments["hidden_states"]
        self.guarded.set_prompt_states([step.request_ids[i] for i in new], hidden[ends.to(hidden.device)])

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """Required by vLLM; the hook replaces it."""
        raise RuntimeError("freedraft's hook in vLLM's model runner is not in place: run 'freedraft doctor'")


def draft_lists(draft: DraftBatch | None, step: Step, batch_size: int) -> list[list[int]]:
    """Draft tokens by row of vLLM's batch, in vLLM's form. draft: chains, or None."""
    drafts: list[list[int]] = [[] for _ in range(batch_size)]
    if draft is not None:
        rows, counts = step.engine.rows.tolist(), draft.counts.tolist()
        for row, tokens, count in zip(rows, draft.tokens.tolist(), counts, strict=True):
            drafts[row] = tokens[1:count]
    return drafts


def install(runs_model: bool) -> None:
    """Hook vLLM's model runner, once per process. Other drafters are not affected. runs_model: see `MethodSpec`."""
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    wrap_once(GPUModelRunner, "propose_draft_token_ids", _propose)
    wrap_once(GPUModelRunner, "_update_states", _update_states)
    if hasattr(GPUModelRunner, "shutdown"):
        wrap_once(GPUModelRunner, "shutdown", before(_close))
    wrap_once(GPUModelRunner, "initialize_kv_cache", after(_prepare))
    wrap_once(gpu_model_runner, "build_logitsprocs", _build_processors)
    if runs_model:
        wrap_once(GPUModelRunner, "capture_model", after(_capture))
        wrap_once(GPUModelRunner, "profile_cudagraph_memory", partial(with_draft_graphs, _ours))


def _ours(runner: Any) -> MethodProposer | None:
    drafter = getattr(runner, "drafter", None)
    return drafter if isinstance(drafter, MethodProposer) else None


def _close(runner: Any) -> None:
    if (ours := _ours(runner)) is not None:
        ours.close()


def _propose(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
    if (ours := _ours(runner)) is None:
        return original(runner, *args, **kwargs)
    # As at the start of vLLM's own function.
    runner._draft_probs = None
    runner._draft_prob_req_ids = None
    arguments = signature_of(original).bind(runner, *args, **kwargs).arguments
    drafts, model = None, ours.draft_model
    if ours.guarded is not None:
        with nullcontext() if model is None else model.ranks.leading(), ours.guarded:
            drafts = ours.draft(runner, arguments)
    elif model is not None:
        model.serve(V1StepState(runner, arguments, np.zeros(0, np.intp)).pages)
    return drafts or [[] for _ in arguments["sampled_token_ids"]]


def _update_states(original: Callable[..., Any], runner: Any, scheduled: Any, *args: Any, **kwargs: Any) -> Any:
    """Called also in the step without tokens after the last request has ended."""
    if (ours := _ours(runner)) is None:
        return original(runner, scheduled, *args, **kwargs)
    # In vLLM one request near max_model_len turns drafting off for the whole batch. Ours are checked one by one.
    length: int = runner.speculative_config.num_speculative_tokens
    runner.effective_drafter_max_model_len = runner.max_model_len + length + 1
    if ours.guarded is None:
        return original(runner, scheduled, *args, **kwargs)
    new = scheduled.scheduled_new_reqs
    # An id that starts again (resubmitted after an abort, streamed input) loses its state.
    if ended := scheduled.finished_req_ids | ({request.req_id for request in new} & ours.guarded.running):
        with ours.guarded:
            ours.finish(ended, runner.requests)
    result = original(runner, scheduled, *args, **kwargs)
    for request in new:
        with ours.guarded:  # a failure affects its request only
            ours.begin(runner.input_batch, request)
    return result


def _capture(_: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    if (ours := _ours(runner)) is not None and ours.draft_model is not None:
        ours.draft_model.capture(runner.input_batch.block_table[0].max_num_blocks_per_req)


def _prefer(config: Any, min_cg_support: Any, *args: Any, **kwargs: Any) -> None:
    """Set CUDA graph mode FULL once the attention backends are known, if they can be captured for any batch. By default
    (FULL_AND_PIECEWISE) only steps in which every request has 1 + K tokens have full graphs, which is rare."""
    from vllm.config import CUDAGraphMode
    from vllm.v1.attention.backend import AttentionCGSupport

    preferred = getattr(config, _PREFERRED, False) and min_cg_support == AttentionCGSupport.ALWAYS
    if preferred and config.cudagraph_mode == CUDAGraphMode.FULL_AND_PIECEWISE:
        config.cudagraph_mode = CUDAGraphMode.FULL


def _build_processors(
    original: Callable[..., Any], vllm_config: Any, device: Any, is_pin_memory: bool, is_pooling_model: bool,
    custom_logitsprocs: Any = (),
) -> Any:  # fmt: skip
    """Build all of vLLM's own logits processors; with drafts vLLM itself builds `min_tokens` only."""
    from vllm.v1.sample.logits_processor import BUILTIN_LOGITS_PROCESSORS, LogitsProcessors

    # Custom ones may read the output, which lacks the drafts: vLLM refuses them.
    if custom_logitsprocs or configured(vllm_config).name not in METHODS:
        return original(vllm_config, device, is_pin_memory, is_pooling_model, custom_logitsprocs)
    return LogitsProcessors(made(vllm_config, device, is_pin_memory) for made in BUILTIN_LOGITS_PROCESSORS)


def _prepare(_: None, runner: Any, kv_cache_config: Any, is_profiling: bool = False, *args: Any, **kwargs: Any) -> None:
    if not is_profiling and (ours := _ours(runner)) is not None:
        runner.rejection_sampler = Matching(runner.sampler)
        ours.prepare(runner)
