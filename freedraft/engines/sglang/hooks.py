"""What of SGLang we call, wrap or read, as a table that is checked before anything is registered, and by the doctor."""

from __future__ import annotations

from freedraft.engines.hooks import Hook
from freedraft.engines.sglang.cpu import torchvision_stand_in
from freedraft.engines.sglang.patches import ASSIGN_SLOTS, CORPUS_SPEC, ROW_ROOM

_SRT = "sglang.srt"

PACKAGE = "sglang"
DISTRIBUTIONS = ("sglang",)
ENTRY_POINT_GROUP = "sglang.srt.plugins"
TESTED_VERSIONS = ("0.5.23",)

# So that the table can be checked on a machine without a GPU, whether or not the CPU platform is selected.
torchvision_stand_in.install_without_gpu()


def _patched(path: str, parameters: tuple[str, ...], purpose: str) -> Hook:
    module, _, name = path.rpartition(".")
    return Hook(module, name, parameters, purpose=purpose)


HOOKS: tuple[Hook, ...] = (
    Hook(f"{_SRT}.speculative.spec_info.SpeculativeAlgorithm", "register", ("name", "supports_overlap",
         "spec_class"), purpose="registers --speculative-algorithm"),
    Hook(f"{_SRT}.speculative.spec_registry", "get_spec", ("name",), purpose="registers --speculative-algorithm"),
    Hook(f"{_SRT}.speculative.spec_registry.CustomSpecAlgo", "handle_server_args", ("server_args",),
         purpose="defaults and refusals at start"),
    Hook(f"{_SRT}.server_args", "ServerArgs", assigned=("attention_backend", "prefill_attention_backend",
         "decode_attention_backend", "speculative_attention_mode", "page_size", "device", "tp_size", "model_path",
         "trust_remote_code", "revision", "speculative_num_draft_tokens", "speculative_num_steps",
         "speculative_eagle_topk", "speculative_accept_threshold_single", "speculative_accept_threshold_acc",
         "enable_mixed_chunk", "max_running_requests"), purpose="defaults and refusals at start"),
    Hook(f"{_SRT}.speculative.base_spec_worker.BaseSpecWorker", "alloc_memory_pool", ("req_to_token_pool",
         "token_to_kv_pool_allocator"), purpose="the KV pool that accepted paths are compacted in"),
    Hook(f"{_SRT}.speculative.base_spec_worker.BaseSpecWorker", "init_attention_backends", purpose="drafting"),
    Hook(f"{_SRT}.speculative.base_spec_worker.BaseSpecWorker", "init_cuda_graphs", purpose="a CUDA graph per width"),
    Hook(f"{_SRT}.speculative.base_spec_worker.BaseSpecWorker", "note_request_finished", ("rid",),
         purpose="forgets a request's n-grams when it ends"),
    Hook(f"{_SRT}.speculative.ngram_info.NgramVerifyInput", "__init__", ("draft_token", "custom_mask", "positions",
         "retrieve_index", "retrieve_next_token", "retrieve_next_sibling", "draft_token_num", "new_seq_lens",
         "accept_tokens", "accept_lens"),
         purpose="the tree as the attention backends read it, and the relay to the next step"),
    Hook(f"{_SRT}.managers.overlap_utils.FutureMap", "__init__", ("device", "spec_algo", "req_to_token_pool",
         "needs_cpu_seq_lens", "needs_confidence_relay"), purpose="overlap scheduling"),
    Hook(f"{_SRT}.managers.overlap_utils.FutureMap", "resolve_seq_lens_cpu", ("batch",), purpose="overlap scheduling"),
    Hook(f"{_SRT}.managers.utils.GenerationBatchResult", fields=("accept_lens", "new_seq_lens", "next_draft_input",
         "speculative_num_draft_tokens"), purpose="the result of a step"),
    Hook(f"{_SRT}.managers.schedule_batch", "ScheduleBatch", fields=("reqs", "forward_mode", "input_ids",
         "out_cache_loc", "seq_lens", "seq_lens_cpu", "req_pool_indices", "req_pool_indices_cpu", "req_to_token_pool",
         "spec_info", "sampling_info", "has_grammar", "return_logprob", "return_hidden_states"),
         purpose="the requests of a step"),
    Hook(f"{_SRT}.managers.schedule_batch", "Req", assigned=("rid", "origin_input_ids", "origin_input_ids_unpadded",
         "output_ids", "sampling_params", "custom_logit_processor", "extra_key", "cache_salt", "finished",
         "finished_reason", "finished_len"), purpose="the tokens of each request"),
    Hook(f"{_SRT}.sampling.sampling_params", "SamplingParams", assigned=("custom_params", "frequency_penalty",
         "presence_penalty", "repetition_penalty", "min_new_tokens", "max_new_tokens"),
         purpose="no drafts beside penalties, or beyond a request's end"),
    Hook(f"{_SRT}.managers.tp_worker.TpModelWorker", "forward_batch_generation", ("is_verify",),
         purpose="the verifying forward pass"),
    Hook(f"{_SRT}.managers.tp_worker", "TpModelWorker", assigned=("get_memory_pool", "model_runner", "tokenizer"),
         purpose="the KV pool that accepted paths are compacted in"),
    Hook(f"{_SRT}.model_executor.model_runner.ModelRunner", "_get_attention_backend", ("init_new_workspace",),
         purpose="a CUDA graph per width"),
    Hook(f"{_SRT}.model_executor.model_runner", "ModelRunner", assigned=("attn_backend", "decode_cuda_graph_runner",
         "init_new_workspace", "prefill_attention_backend_str", "decode_attention_backend_str",
         "sliding_window_size", "max_running_requests", "model_config", "server_args"),
         purpose="a CUDA graph per width, and what attention verifies"),
    Hook(f"{_SRT}.model_executor.model_runner.ModelRunner", "init_decode_cuda_graph", purpose="a CUDA graph per width"),
    Hook(f"{_SRT}.configs.model_config", "ModelConfig", assigned=("hf_config", "vocab_size", "dtype",
         "attention_chunk_size", "attention_arch", "is_encoder_decoder"), purpose="what attention verifies"),
    Hook(f"{_SRT}.configs.model_config", "AttentionArch", assigned=("MLA",), purpose="what attention verifies"),
    Hook(f"{_SRT}.configs.hybrid_arch", "mambaish_config", purpose="refuses recurrent layers"),
    Hook(f"{_SRT}.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner", "__init__",
         ("attn_backend", "speculative_num_steps", "speculative_num_draft_tokens"),
         purpose="a CUDA graph per width"),
    Hook(f"{_SRT}.runtime_context", "get_context", purpose="a CUDA graph per width"),
    Hook(f"{_SRT}.runtime_context.RuntimeContext", "override", purpose="a CUDA graph per width"),
    Hook(f"{_SRT}.runtime_context", "get_spec", purpose="the options of speculation"),
    Hook(f"{_SRT}.runtime_context", "get_device", purpose="the device"),
    Hook(f"{_SRT}.runtime_context", "get_exec", purpose="the sampler whose distribution is reproduced"),
    Hook(f"{_SRT}.runtime_context", "get_parallel", purpose="tensor-parallel ranks and replicas"),
    Hook(f"{_SRT}.distributed.parallel_state", "GroupCoordinator", assigned=("ranks", "rank_in_group", "world_size",
         "cpu_group", "broadcast"), purpose="tensor-parallel ranks"),
    Hook(f"{_SRT}.model_executor.forward_batch_info", "ForwardMode", assigned=("TARGET_VERIFY", "DECODE", "is_decode",
         "is_extend"), purpose="the verifying forward pass"),
    Hook("sglang.kernels.ops.speculative.cache_locs", "assign_extend_cache_locs_func", ("req_pool_indices",
         "req_to_token", "start_offset", "end_offset", "batch_size", "draft_token_num", "device"),
         purpose="slots to verify in"),
    Hook(f"{_SRT}.speculative.spec_utils", "record_stream_for_v2_verify", ("batch", "verify_input", "fwd_stream"),
         purpose="CUDA streams under overlap"),
    Hook(f"{_SRT}.speculative.spec_utils", "move_accept_tokens_to_target_kvcache", ("batch", "accept_index",
         "num_correct_drafts", "token_to_kv_pool_allocator"), purpose="accepted paths in pools of other kinds"),
    Hook(f"{_SRT}.mem_cache.memory_pool", "MHATokenToKVPool", assigned=("k_buffer", "v_buffer", "kv_cache_layout",
         "is_quantized_kv_cache"), purpose="the KV pool that accepted paths are compacted in"),
    Hook(f"{_SRT}.managers.schedule_batch.Req", "__init__", ("extra_key", "cache_salt", "lora_id"),
         purpose="tenants of live datastores"),
    Hook(f"{_SRT}.speculative.spec_utils", "build_grammar_vocab_mask", ("reqs", "tree", "sampling_info", "device",
         "barrier"), purpose="structured output over a tree"),
    Hook(f"{_SRT}.speculative.spec_utils.GrammarTree", "from_host", purpose="structured output over a tree"),
    Hook(f"{_SRT}.layers.logprob_processor", "compute_spec_logprobs", ("batch", "logits_output", "predict",
         "accept_index"), purpose="logprobs of accepted tokens"),
    Hook(f"{_SRT}.layers.logits_processor", "LogitsProcessorOutput", fields=("next_token_logits", "hidden_states"),
         purpose="the logits of a tree"),
    Hook(f"{_SRT}.sampling.sampling_batch_info", "SamplingBatchInfo", fields=("temperatures", "top_ks", "top_ps",
         "min_ps", "is_all_greedy", "need_top_k_sampling", "need_top_p_sampling", "need_min_p_sampling",
         "sampling_seed", "logit_bias", "grammar_mask", "has_custom_logit_processor"), purpose="sampling"),
    Hook(f"{_SRT}.sampling.sampling_batch_info.SamplingBatchInfo", "apply_logits_bias", ("logits",),
         purpose="penalties and logit bias"),
    Hook(f"{_SRT}.layers.sampler", "apply_custom_logit_processor", ("num_tokens_in_batch",),
         purpose="custom logit processors"),
    Hook(f"{_SRT}.plugins.hook_registry.HookRegistry", "register", ("target", "hook"), purpose="the patches"),
    _patched(ROW_ROOM, (), "room for drafts at the end of the context"),
    Hook(f"{_SRT}.mem_cache.allocation_sizing", "get_alloc_reserve_per_decode",
         purpose="room for drafts at the end of the context"),
    Hook(f"{_SRT}.utils.hf_transformers_utils", "get_config", ("model", "trust_remote_code", "revision"),
         purpose="the model's configuration"),
)  # fmt: skip

# What drafting does without, where it is not there.
CORPUS_HOOKS: tuple[Hook, ...] = (_patched(CORPUS_SPEC, (), "corpora over HTTP"),)

OPTIONAL_HOOKS = CORPUS_HOOKS

# What a method that runs the target model needs besides.
MODEL_HOOKS: tuple[Hook, ...] = (
    Hook(f"{_SRT}.model_executor.forward_batch_info.ForwardBatch", "init_new", ("batch", "model_runner",
         "return_hidden_states_before_norm"), purpose="a draft pass"),
    Hook(f"{_SRT}.model_executor.model_runner.ModelRunner", "forward", ("forward_batch",), purpose="a draft pass"),
    Hook(f"{_SRT}.model_executor.forward_batch_info", "get_server_return_hidden_states_mode",
         purpose="the hidden states behind prompts"),
    Hook(f"{_SRT}.model_executor.forward_batch_info", "CaptureHiddenMode", assigned=("LAST", "is_full"),
         purpose="the hidden states behind prompts"),
    Hook(f"{_SRT}.distributed.parallel_state.GroupCoordinator", "broadcast_object", ("obj", "src"),
         purpose="draft passes on tensor-parallel ranks"),
    Hook(f"{_SRT}.distributed.communication_op", "tensor_model_parallel_all_reduce", ("input_",),
         purpose="draft passes on tensor-parallel ranks"),
    Hook(f"{_SRT}.layers.linear", "RowParallelLinear", assigned=("reduce_results",),
         purpose="draft passes on tensor-parallel ranks"),
    Hook(f"{_SRT}.models.llama.LlamaDecoderLayer", "forward", purpose="the layers that are skipped"),
    Hook(f"{_SRT}.models.llama.LlamaMLP", "forward", purpose="the layers that are skipped"),
    Hook(f"{_SRT}.models.qwen2.Qwen2DecoderLayer", "forward", purpose="the layers that are skipped"),
    Hook(f"{_SRT}.models.qwen2.Qwen2MLP", "forward", purpose="the layers that are skipped"),
    Hook(f"{_SRT}.models.qwen3.Qwen3DecoderLayer", "forward", purpose="the layers that are skipped"),
    Hook(f"{_SRT}.layers.layernorm.RMSNorm", "forward_native", ("x", "residual"),
         purpose="the layers that are skipped"),
    Hook(f"{_SRT}.layers.logits_processor.LogitsProcessor", "forward", ("input_ids", "hidden_states", "lm_head",
         "logits_metadata"), purpose="the logits of a draft pass"),
)  # fmt: skip

CPU_HOOKS: tuple[Hook, ...] = (
    Hook(f"{_SRT}.layers.attention.attention_registry", "register_attention_backend", ("name",),
         purpose="tree attention"),
    Hook(f"{_SRT}.layers.attention.torch_native_backend.TorchNativeAttnBackend", "forward_extend", purpose="prefill"),
    Hook(f"{_SRT}.platforms.interface.SRTPlatform", "get_kv_pool_cls", ("kind",), purpose="the KV pool"),
    Hook(f"{_SRT}.platforms.interface.SRTPlatform", "get_speculative_cache_locs_fn", purpose="slots to verify in"),
    Hook(f"{_SRT}.mem_cache.memory_pool.MHATokenToKVPool", "_move_kv_cache_impl", purpose="the KV pool"),
    _patched(ASSIGN_SLOTS, ("req_pool_indices", "req_to_token", "out_cache_loc"), "slots of the verify window"),
)  # fmt: skip
