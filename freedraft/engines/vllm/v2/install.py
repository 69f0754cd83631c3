"""The hooks in vLLM's model runner V2 that install a `MethodSpeculator` and pass it requests and logits.

V2 takes its speculator for method "ngram_gpu" from a module attribute, which is replaced by ours.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import torch

from freedraft.engines.vllm.context import configured
from freedraft.engines.vllm.draft_graphs import with_draft_graphs
from freedraft.engines.vllm.patching import after, before, signature_of, wrap_once
from freedraft.engines.vllm.v2.drafting import HostDrafting
from freedraft.engines.vllm.v2.heads import OnTop
from freedraft.engines.vllm.v2.lengths import LENGTHS, find_nearest, whole_table
from freedraft.engines.vllm.v2.matching import match
from freedraft.engines.vllm.v2.next_step import Stage
from freedraft.engines.vllm.v2.speculator import MethodSpeculator
from freedraft.method import METHODS

SPECULATOR = "_freedraft_speculator"  # Attribute of vLLM's RejectionSampler, DefaultModelState and head


def install() -> None:
    """Hook vLLM's model runner V2, once per process. Other speculators are not affected."""
    from vllm.v1.worker import gpu_worker
    from vllm.v1.worker.gpu import cudagraph_utils, model_runner
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.model_states.default import DefaultModelState
    from vllm.v1.worker.gpu.spec_decode.ngram import speculator
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    wrap_once(gpu_worker.Worker, "compile_or_warm_up_model", _warm_up)
    wrap_once(speculator, "NgramGPUSpeculator", _or_ours)
    wrap_once(model_runner, "init_speculator", _on_top)
    wrap_once(cudagraph_utils, "build_dynamic_sd_schedule_lookup", whole_table)
    wrap_once(GPUModelRunner, "shutdown", before(_close))
    wrap_once(GPUModelRunner, "finish_requests", before(_end))
    wrap_once(GPUModelRunner, "add_requests", after(_add))
    wrap_once(GPUModelRunner, "sample_tokens", after(_send_lengths))
    wrap_once(GPUModelRunner, "initialize_kv_cache", after(_prepare))
    wrap_once(GPUModelRunner, "profile_cudagraph_memory", partial(with_draft_graphs, _ours))
    wrap_once(RejectionSampler, "__call__", before(_keep_logits))
    wrap_once(RejectionSampler, "_verify", _verify)
    wrap_once(cudagraph_utils.CudaGraphManager, "_init_candidates", after(find_nearest))
    wrap_once(GPUModelRunner, "prepare_attn", after(_begin_step))
    wrap_once(GPUModelRunner, "sample", before(_approach))
    wrap_once(DefaultModelState, "prepare_attn", before(_note_attention))


def _or_ours(original: Callable[..., Any], vllm_config: Any, device: torch.device, req_states: Any) -> Any:
    ours = configured(vllm_config).name in METHODS
    return (MethodSpeculator if ours else original)(vllm_config, device, req_states)


def _on_top(original: Callable[..., Any], vllm_config: Any, device: torch.device, req_states: Any) -> Any:
    made = original(vllm_config, device, req_states)
    if configured(vllm_config).head:
        setattr(made, SPECULATOR, OnTop(vllm_config, device, req_states, made))
    return made


def _ours(runner: Any) -> MethodSpeculator | None:
    speculator = getattr(runner, "speculator", None)
    speculator = getattr(speculator, SPECULATOR, speculator)
    return speculator if isinstance(speculator, MethodSpeculator) else None


def _drafting(runner: Any) -> HostDrafting | None:
    """In the drafting rank, except during warm-up."""
    ours = _ours(runner)
    return None if ours is None or ours.warming_up else ours.host


def _warm_up(original: Callable[..., Any], worker: Any, *args: Any, **kwargs: Any) -> Any:
    """vLLM compiles kernels with dummy requests: they are not drafted for, or learnt from."""
    if (ours := _ours(worker.model_runner)) is None:
        return original(worker, *args, **kwargs)
    ours.warm_up(True)
    try:
        return original(worker, *args, **kwargs)
    finally:
        ours.warm_up(False)


def _close(runner: Any) -> None:
    if (ours := _ours(runner)) is not None:
        ours.close()
        for holder in (runner.speculator, runner.rejection_sampler, runner.model_state):
            if getattr(holder, SPECULATOR, None) is not None:
                delattr(holder, SPECULATOR)


def _end(runner: Any, scheduler_output: Any) -> None:
    if (host := _drafting(runner)) is not None:
        for request_id in scheduler_output.preempted_req_ids or ():
            host.requests.preempt(request_id)
        for request_id in scheduler_output.finished_req_ids:
            host.requests.finish(request_id)
        if scheduler_output.finished_req_ids and not scheduler_output.total_num_scheduled_tokens:
            with host.guarded:
                host.catch_up()  # no step follows the newest one


def _add(_: Any, runner: Any, scheduler_output: Any) -> None:
    new = scheduler_output.scheduled_new_reqs
    if (ours := _ours(runner)) is not None and ours.trees is not None:
        ours.trees.add(new)
    if (host := _drafting(runner)) is not None:
        for request in new:
            with host.guarded:  # a failure affects its request only
                host.add(request)


def _prepare(_: None, runner: Any, kv_cache_config: Any, is_profiling: bool = False, *args: Any, **kwargs: Any) -> None:
    if not is_profiling and (ours := _ours(runner)) is not None:
        ours.prepare(runner)
        if runner.rejection_sampler is not None:
            setattr(runner.rejection_sampler, SPECULATOR, ours)
        if ours.usual_stage is Stage.MODEL:
            setattr(runner.model_state, SPECULATOR, ours)
            connector = runner.kv_connector = copy(runner.kv_connector)  # which may be the one of other runners
            connector.pre_forward = partial(_launch, ours, connector.pre_forward)


def _keep_logits(sampler: Any, logits: Any, input_batch: Any, *args: Any, **kwargs: Any) -> None:
    if (ours := getattr(sampler, SPECULATOR, None)) is not None:
        ours.keep_logits(logits, input_batch)


def _begin_step(prepared: tuple[Any, torch.Tensor], runner: Any, input_batch: Any) -> None:
    if (ours := _ours(runner)) is not None:
        ours.begin_step(input_batch, prepared[1])


def _note_attention(model_state: Any, input_batch: Any, *args: Any, **kwargs: Any) -> None:
    ours = getattr(model_state, SPECULATOR, None)
    if ours is not None and ours.by_score is not None and ours.next.batch is input_batch and ours.by_score.late:
        ours.by_score.attention = partial(model_state.prepare_attn, input_batch, *args, **kwargs)


def _approach(runner: Any, *args: Any, **kwargs: Any) -> None:
    """The model has been launched; its tokens are drawn next."""
    if (host := _drafting(runner)) is not None:
        host.before.approach()  # the present step takes its place


def _launch(ours: MethodSpeculator, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """The last call before the model is launched, in steps of requests and in dummy steps, which find no batch."""
    original(*args, **kwargs)
    if ours.next.batch is not None:
        ours.reach(Stage.MODEL)


def _verify(original: Callable[..., Any], sampler: Any, *args: Any, **kwargs: Any) -> Any:
    ours: MethodSpeculator | None = getattr(sampler, SPECULATOR, None)
    if ours is None or not ours.matches:
        return original(sampler, *args, **kwargs)
    given = signature_of(original).bind(sampler, *args, **kwargs).arguments
    return match(sampler, given) if ours.trees is None else ours.trees.verify(sampler, given, ours.next)


def _send_lengths(output: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
    """With vLLM's AsyncOutput of a step."""
    if (ours := _ours(runner)) is not None and ours.next.lengths:
        if (sent := getattr(output, "model_runner_output", None)) is not None:
            setattr(sent, LENGTHS, ours.next.lengths)
        ours.next.lengths = []
