"""Tables of the SGLang names that freedraft calls, wraps or reads, checked before registration and by the doctor."""

from freedraft.engines.hooks import table
from freedraft.engines.sglang_cpu import NAME, torchvision_stand_in

DISTRIBUTIONS = ("sglang",)
ENTRY_POINT_GROUP = "sglang.srt.plugins"
TESTED_VERSIONS = ("0.5.23",)

# Allows the tables to be checked without a GPU, whether or not the CPU platform is selected.
torchvision_stand_in.install_without_gpu()

HOOKS = table("""
    # registration, defaults and refusals at start
    sglang.srt.speculative.spec_info.SpeculativeAlgorithm.register(name, supports_overlap, spec_class)
    sglang.srt.speculative.spec_registry.get_spec(name)
    sglang.srt.speculative.spec_registry.CustomSpecAlgo.handle_server_args(server_args)
    sglang.srt.server_args.ServerArgs has attention_backend, prefill_attention_backend, decode_attention_backend,
        speculative_attention_mode, page_size, device, tp_size, model_path, trust_remote_code, revision,
        speculative_num_draft_tokens, speculative_num_steps, speculative_eagle_topk,
        speculative_accept_threshold_single, speculative_accept_threshold_acc, enable_mixed_chunk, max_running_requests,
        grammar_backend, linear_attn_verify_backend, mamba_backend, enable_linear_replayssm_spec, attn_dp_size
    sglang.srt.arg_groups.model_override_base.model_config_of(server_args)
    sglang.srt.configs.model_config.ModelConfig has hf_config, vocab_size, dtype, attention_chunk_size,
        attention_arch, is_encoder_decoder
    sglang.srt.configs.model_config.AttentionArch has MLA
    sglang.srt.configs.hybrid_arch.mambaish_config
    sglang.srt.configs.hybrid_arch.hybrid_gdn_config
    sglang.srt.configs.hybrid_arch.kimi_linear_config
    sglang.srt.speculative.spec_utils.prepare_mamba_track_for_verify(batch)
    sglang.srt.speculative.spec_utils.commit_mamba_states_after_verify(target_worker, batch, accept_lens, accept_index,
        draft_token_num)
    sglang.srt.layers.attention.mamba.mamba.selective_state_update(cache_steps, intermediate_states_buffer)
    sglang.srt.mem_cache.memory_pool.HybridLinearKVPool has full_kv_pool
    sglang.srt.layers.attention.hybrid_linear_attn_backend.HybridLinearAttnBackend has full_attn_backend,
        linear_attn_backend
    sglang.srt.runtime_context.get_spec
    sglang.srt.runtime_context.get_device
    sglang.srt.runtime_context.get_disagg
    sglang.srt.runtime_context.get_parallel
    sglang.srt.runtime_context.get_platform
    sglang.srt.layers.dp_attention.get_dp_tp_group
    sglang.srt.distributed.parallel_state.GroupCoordinator has rank_in_group, world_size, cpu_group, broadcast
    sglang.srt.distributed.parallel_state.GroupCoordinator.broadcast_object(obj, src)
    sglang.srt.plugins.hook_registry.HookRegistry.register(target, hook)
    sglang.srt.plugins.hook_registry.HookType has AROUND
    sglang.srt.utils.hf_transformers_utils.get_config(model, trust_remote_code, revision)
    # the KV of drafts
    sglang.srt.speculative.base_spec_worker.BaseSpecWorker.alloc_memory_pool(req_to_token_pool,
        token_to_kv_pool_allocator)
    sglang.srt.managers.tp_worker.TpModelWorker has get_memory_pool, model_runner, tokenizer
    sglang.kernels.ops.speculative.cache_locs.assign_extend_cache_locs_func(req_pool_indices, req_to_token,
        start_offset, end_offset, batch_size, draft_token_num, device)
    sglang.srt.speculative.spec_utils.move_accept_tokens_to_target_kvcache(batch, accept_index, num_correct_drafts,
        token_to_kv_pool_allocator)
    sglang.srt.mem_cache.memory_pool.MHATokenToKVPool has k_buffer, v_buffer, kv_cache_layout,
        is_quantized_kv_cache
    sglang.srt.mem_cache.memory_pool.MLATokenToKVPool has kv_buffer
    sglang.srt.mem_cache.allocation_sizing.get_req_to_token_extra_context_len
    sglang.srt.mem_cache.allocation_sizing.get_alloc_reserve_per_decode
    # requests and steps
    sglang.srt.speculative.base_spec_worker.BaseSpecWorker.init_attention_backends
    sglang.srt.speculative.base_spec_worker.BaseSpecWorker.note_request_finished(rid)
    sglang.srt.managers.overlap_utils.FutureMap.__init__(device, spec_algo, req_to_token_pool, needs_cpu_seq_lens,
        needs_confidence_relay)
    sglang.srt.managers.overlap_utils.FutureMap has spec_algo
    sglang.srt.managers.overlap_utils.FutureMap.resolve_seq_lens_cpu(batch)
    sglang.srt.managers.overlap_utils.RelayPayload.from_ngram(draft_input)
    sglang.srt.managers.utils.GenerationBatchResult has accept_lens, new_seq_lens, next_draft_input,
        speculative_num_draft_tokens
    sglang.srt.managers.schedule_batch.ScheduleBatch has reqs, forward_mode, input_ids, out_cache_loc, seq_lens,
        seq_lens_cpu, req_pool_indices, req_pool_indices_cpu, req_to_token_pool, spec_info, sampling_info, has_grammar,
        return_logprob, return_hidden_states, global_num_tokens, is_extend_in_batch
    sglang.srt.managers.schedule_batch.Req has rid, origin_input_ids, origin_input_ids_unpadded, output_ids,
        sampling_params, custom_logit_processor, extra_key, cache_salt, finished, finished_len
    sglang.srt.sampling.sampling_params.SamplingParams has custom_params, frequency_penalty, presence_penalty,
        repetition_penalty, min_new_tokens, max_new_tokens
    sglang.srt.speculative.spec_utils.record_stream_for_v2_verify(batch, verify_input, fwd_stream)
    sglang.srt.managers.schedule_batch.Req.__init__(extra_key, cache_salt, lora_id)
    # a CUDA graph per width
    sglang.srt.speculative.base_spec_worker.BaseSpecWorker.init_cuda_graphs
    sglang.srt.model_executor.model_runner.ModelRunner._get_attention_backend(init_new_workspace)
    sglang.srt.model_executor.model_runner.ModelRunner has attn_backend, decode_cuda_graph_runner,
        init_new_workspace, prefill_attention_backend_str, decode_attention_backend_str, sliding_window_size,
        max_running_requests, model_config, sampler, server_args
    sglang.srt.model_executor.model_runner.ModelRunner.init_decode_cuda_graph
    sglang.srt.model_executor.model_runner.SamplingPrewarmResult
    sglang.srt.layers.attention.hybrid_attn_backend.HybridAttnBackend
    sglang.srt.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.__init__(attn_backend,
        speculative_num_steps, speculative_num_draft_tokens)
    sglang.srt.runtime_context.get_context
    sglang.srt.runtime_context.RuntimeContext.override
    # verification
    sglang.srt.speculative.ngram_info.NgramVerifyInput.__init__(draft_token, custom_mask, positions, retrieve_index,
        retrieve_next_token, retrieve_next_sibling, draft_token_num, new_seq_lens, accept_tokens, accept_lens)
    sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation(forward_batch, is_verify)
    sglang.srt.model_executor.forward_batch_info.ForwardMode has TARGET_VERIFY, DECODE, is_decode, is_extend, is_idle
    sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new(batch, model_runner,
        return_hidden_states_before_norm)
    sglang.srt.model_executor.forward_batch_info.ForwardBatch.post_forward_mlp_sync_batch(logits_output)
    sglang.srt.speculative.spec_utils.build_grammar_vocab_mask(reqs, tree, sampling_info, device, barrier)
    sglang.srt.speculative.spec_utils.GrammarTree.from_host
    sglang.srt.utils.async_probe.sanitize_nan_logits(logits, msg)
    sglang.srt.layers.logprob_processor.compute_spec_logprobs(batch, logits_output, predict, accept_index)
    sglang.srt.layers.logits_processor.LogitsProcessorOutput has next_token_logits, hidden_states
    sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo has temperatures, top_ks, top_ps, min_ps,
        is_all_greedy, need_top_k_sampling, need_top_p_sampling, need_min_p_sampling, sampling_seed, logit_bias,
        grammars, grammar_mask, has_custom_logit_processor
    sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.apply_logits_bias(logits)
    sglang.srt.layers.sampler.apply_custom_logit_processor(num_tokens_in_batch)
    sglang.srt.layers.sampler.SYNC_TOKEN_IDS_ACROSS_TP
    sglang.srt.layers.sampler.Sampler.forward(logits_output, sampling_info, return_logprob, top_logprobs_nums,
        token_ids_logprobs, positions)
""")

# Optional: drafting works without these.
CORPUS_HOOKS = table("""
    # corpora over HTTP
    sglang.srt.managers.tokenizer_control_mixin.get_spec
""")

ROOM_HOOKS = table("""
    # default draft length of recurrent models
    sglang.srt.utils.common.get_device_memory_capacity(device)
""")

DEVICE_HOOKS = table("""
    # device of the CPU platform without --device cpu
    sglang.srt.arg_groups.serving_hook.handle_missing_default_values(server_args)
    sglang.srt.arg_groups.overrides.declare_resolution(server_args)
    sglang.srt.utils.common.get_device
""")

LORA_HOOKS = table("""
    # LoRA adapters
    sglang.srt.arg_groups.lora_hook.check_lora_speculative_compatibility(server_args)
    sglang.srt.model_executor.model_runner.ModelRunner has lora_manager
""")

HEAD_HOOKS = table("""
    # n-grams on top of EAGLE and MTP
    sglang.srt.arg_groups.speculative_hook._handle_eagle_family(server_args)
    sglang.srt.arg_groups.overrides.record_foreign_defaults(server_args, source, resolve)
    sglang.srt.arg_groups.overrides.resolution_result(server_args, field)
    sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker(server_args)
    sglang.srt.server_args.ServerArgs has speculative_adaptive, speculative_use_rejection_sampling,
        enable_multi_layer_eagle
    sglang.srt.runtime_context.RuntimeContext has server_args
    sglang.srt.speculative.spec_utils.GrammarTree.from_linear_chain
    sglang.srt.managers.schedule_batch.Req has retracted_stain
""")

# Of schedulers: nothing else imports these so early.
HEAD_WORKER_HOOKS = table("""
    # n-grams on top of EAGLE and MTP
    sglang.srt.speculative.eagle_worker_v2.EAGLEWorkerV2._forward_prefill_batch(batch, on_publish, pp_proxy_tensors)
    sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.draft(batch)
    sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker._draft_extend_for_decode(batch, batch_result)
    sglang.srt.speculative.draft_utils.DraftBackendFactory.create_draft_extend_backend
    sglang.srt.speculative.eagle_info.EagleDraftInput
    sglang.srt.speculative.eagle_info.EagleVerifyInput
""")

SESSION_HOOKS = table("""
    # sessions
    sglang.srt.session.session_controller.Session._concat_token_arrays(last_req, req, session_params)
    sglang.srt.managers.schedule_batch.Req has output_ids_through_stop
""")

STREAM_HOOKS = table("""
    # streams, token by token
    sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request(obj, request)
    sglang.srt.managers.tokenizer_manager.TokenizerManager has incremental_streaming_output, tokenizer
    sglang.srt.runtime_context.get_serving
    sglang.srt.managers.schedule_batch.Req has update_finish_state, reasoning_tokens, finished_len
""")

PREDICTION_HOOKS = table("""
    # predictions of answers
    sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase.handle_request(request, raw_request)
    sglang.srt.entrypoints.openai.serving_base.OpenAIServingBase has tokenizer_manager, create_error_response
    sglang.srt.entrypoints.openai.protocol.ChatCompletionRequest has custom_params
    sglang.srt.entrypoints.openai.protocol.CompletionRequest has custom_params
""")

OPTIONAL_HOOKS = CORPUS_HOOKS + ROOM_HOOKS + DEVICE_HOOKS + LORA_HOOKS + SESSION_HOOKS + STREAM_HOOKS
OPTIONAL_HOOKS += HEAD_HOOKS + HEAD_WORKER_HOOKS + PREDICTION_HOOKS

# Additional names for methods that run the target model.
MODEL_HOOKS = table("""
    # draft passes
    sglang.srt.model_executor.model_runner.ModelRunner.forward(forward_batch)
    sglang.srt.model_executor.forward_batch_info.get_server_return_hidden_states_mode
    sglang.srt.model_executor.forward_batch_info.CaptureHiddenMode has LAST, is_full
    sglang.srt.distributed.tensor_model_parallel_all_reduce(input_)
    sglang.srt.layers.linear.RowParallelLinear has reduce_results
    sglang.srt.models.llama.LlamaDecoderLayer.forward
    sglang.srt.models.llama.LlamaMLP.forward
    sglang.srt.models.qwen2.Qwen2DecoderLayer.forward
    sglang.srt.models.qwen2.Qwen2MLP.forward
    sglang.srt.models.qwen3.Qwen3DecoderLayer.forward
    sglang.srt.layers.layernorm.RMSNorm.forward_native(x, residual)
    sglang.srt.layers.logits_processor.LogitsProcessor.forward(input_ids, hidden_states, lm_head, logits_metadata)
""")

# Optional, and cannot be imported without a GPU.
FA3_HOOKS = table("""
    # metadata of trees in one kernel
    sglang.srt.layers.attention.flashattention_backend.FlashAttentionBackend.init_forward_metadata_out_graph(in_capture)
    sglang.srt.layers.attention.flashattention_backend.FlashAttentionBackend has forward_metadata,
        forward_metadata_spec_decode_expand, target_verify_metadata_topk_normal, target_verify_metadata_topk_expand,
        req_to_token, page_size, max_context_len, has_swa
""")

CPU_HOOKS = table("""
    # tree attention on a CPU
    sglang.srt.layers.attention.attention_registry.register_attention_backend(name)
    sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_extend
    sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend.forward_decode
    sglang.srt.platforms.interface.SRTPlatform.get_kv_pool_cls(kind)
    sglang.srt.platforms.cpu.CpuDeviceMixin
    sglang.srt.platforms.device_mixin.PlatformEnum
    sglang.srt.mem_cache.memory_pool.KVWriteLoc
    sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._move_kv_cache_impl
    sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func(req_pool_indices, req_to_token, out_cache_loc)
    # the KV of drafts
    sglang.srt.platforms.interface.SRTPlatform.get_speculative_cache_locs_fn
""")


def settings() -> list[str]:
    """What a start of this SGLang needs."""
    from sglang.srt.utils.common import get_device

    try:
        get_device()
    except RuntimeError as error:
        return [f"{error} To serve on the CPU, set SGLANG_PLATFORM={NAME}"]
    return []
