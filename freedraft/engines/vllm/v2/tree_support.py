"""Which engines and requests of vLLM's model runner V2 cannot have draft trees, and why."""

from __future__ import annotations

from typing import Any

import torch
from vllm import envs
from vllm.config import CUDAGraphMode
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from freedraft.engines.vllm.v2.tree_attention import TreeAttention

_STOCK_PROCESSORS = 3  # of logits: biases, penalties, bad words


def why_chains(runner: Any, vllm_config: Any) -> str | None:
    """Why drafts of this engine must be chains, in words for the user; None where they may be trees."""
    model, parallel, ours = vllm_config.model_config, vllm_config.parallel_config, vllm_config.speculative_config
    sampler = runner.sampler
    engine = {
        f"rejection sampling method '{ours.rejection_sample_method}'": ours.rejection_sample_method != "standard",
        "pipeline parallelism": parallel.pipeline_parallel_size > 1,
        "context parallelism": runner.dcp_size > 1 or runner.pcp_manager is not None,
        "microbatches": runner.ubatch_runner is not None,
        "sampling by shards of the batch": runner.batch_sharder is not None,
        "routed experts": vllm_config.aux_output_config.enabled,
        "batch invariance": envs.VLLM_BATCH_INVARIANT,
        "a KV connector": vllm_config.kv_transfer_config is not None,
        "watermarks": vllm_config.watermark_config is not None,
        "replay of traces": sampler is not None and sampler.trace_replay_state is not None,
        "a sampler of the model's own": type(runner.rejection_sampler) is not RejectionSampler,
        "sampling masks": sampler is not None and sampler.return_sampling_mask,
        "logits processors": sampler is not None and len(sampler.logits_processors) > _STOCK_PROCESSORS,
        "positions of several dimensions": getattr(runner.model_state, "rope_state", None) is not None,
        "MLA": model.use_mla,
        "attention that quantises its output": vllm_config.compilation_config.pass_config.fuse_attn_quant,
        "an encoder": runner.is_encoder_decoder,
        "fast prefill of shared KV": runner.fast_prefill is not None,
    }
    if (found := next((name for name, has in engine.items() if has), None)) is not None:
        return f"trees do not go with {found}"
    groups = runner.kv_cache_config.kv_cache_groups
    if len(groups) != 1 or type(groups[0].kv_cache_spec) is not FullAttentionSpec:
        return "trees need full attention of one kind in all layers"
    for backend in {group.backend for group in runner.attn_groups[0]}:
        if not issubclass(backend.get_impl_cls(), TreeAttention):
            name, instead = backend.get_name(), "add --attention-backend TRITON_ATTN"
            if name == "FLASH_ATTN":
                instead = 'set the option "shape" to "tree", or ' + instead
            return f"attention {name} cannot mask them: for trees, {instead}"
    layers = vllm_config.compilation_config.static_forward_context
    for name in groups[0].layer_names:
        if (found := layers[name].impl.why_not()) is not None:
            return f"trees do not go with {found}"
    if runner.cudagraph_manager.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL:
        return "trees do not go with CUDA graph mode FULL: use FULL_AND_PIECEWISE"
    if not all(map(_rows_are_slots, runner.kv_caches)):
        return "trees need a KV cache in layout NHD (LBNHC), a layer's pages one behind the other"
    return None


def _rows_are_slots(cache: torch.Tensor) -> bool:
    """Whether all that a token has in a layer's cache, [P, H, S, D], is one piece, and the pieces are its slots."""
    tokens = cache.transpose(1, 2)
    return tokens[0, 0].is_contiguous() and tokens.stride(0) == tokens.shape[1] * tokens.stride(1)


def needs_chain(request: Any) -> bool:
    """Whether what vLLM's NewRequestData asks for goes by the tokens before, which in its samplers are a chain's."""
    parameters = request.sampling_params
    return parameters is None or bool(
        parameters.structured_outputs is not None
        or parameters.repetition_penalty != 1.0
        or parameters.presence_penalty
        or parameters.frequency_penalty
        or parameters.bad_words
        or parameters.min_tokens
        or parameters.logprobs is not None
        or parameters.logprob_token_ids
        or parameters.thinking_token_budget is not None
        or request.prompt_embeds is not None
    )
