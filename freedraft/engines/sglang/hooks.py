"""What of SGLang we call, wrap or read, as a table that is checked before anything is registered, and by the doctor."""

from __future__ import annotations

from freedraft.engines.hooks import Hook
from freedraft.engines.sglang.cpu import torchvision_stand_in
from freedraft.engines.sglang.patches import ASSIGN_SLOTS, CORPUS_SPEC

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
    Hook(f"{_SRT}.speculative.spec_registry.CustomSpecAlgo", "handle_server_args", ("server_args",),
         purpose="defaults and refusals at start"),
    Hook(f"{_SRT}.speculative.base_spec_worker.BaseSpecWorker", "alloc_memory_pool", ("req_to_token_pool",
         "token_to_kv_pool_allocator"), purpose="the KV pool that accepted paths are compacted in"),
    Hook(f"{_SRT}.speculative.base_spec_worker.BaseSpecWorker", "note_request_finished", ("rid",),
         purpose="forgets a request's n-grams when it ends"),
    Hook(f"{_SRT}.speculative.ngram_info.NgramVerifyInput", "__init__", ("draft_token", "custom_mask", "positions",
         "retrieve_index", "retrieve_next_token", "retrieve_next_sibling", "draft_token_num", "new_seq_lens",
         "accept_tokens", "accept_lens"),
         purpose="the tree as the attention backends read it, and the relay to the next step"),
    Hook(f"{_SRT}.managers.overlap_utils.FutureMap", "__init__", ("device", "spec_algo", "req_to_token_pool",
         "needs_cpu_seq_lens", "needs_confidence_relay"), purpose="overlap scheduling"),
    Hook(f"{_SRT}.managers.utils.GenerationBatchResult", fields=("accept_lens", "new_seq_lens", "next_draft_input",
         "speculative_num_draft_tokens"), purpose="the result of a step"),
    Hook(f"{_SRT}.managers.tp_worker.TpModelWorker", "forward_batch_generation", ("is_verify",),
         purpose="the verifying forward pass"),
    Hook(f"{_SRT}.model_executor.model_runner.ModelRunner", "_get_attention_backend", ("init_new_workspace",),
         purpose="a CUDA graph per width"),
    Hook(f"{_SRT}.model_executor.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner", "__init__",
         ("attn_backend", "speculative_num_steps", "speculative_num_draft_tokens"),
         purpose="a CUDA graph per width"),
    Hook(f"{_SRT}.managers.schedule_batch.Req", "__init__", ("extra_key", "cache_salt", "lora_id"),
         purpose="tenants of live datastores"),
    Hook("sglang.kernels.ops.speculative.cache_locs", "assign_extend_cache_locs_func", purpose="slots to verify in"),
    Hook(f"{_SRT}.speculative.spec_utils", "record_stream_for_v2_verify", purpose="CUDA streams under overlap"),
    Hook(f"{_SRT}.speculative.spec_utils", "build_grammar_vocab_mask", ("reqs", "tree", "sampling_info", "device",
         "barrier"), purpose="structured output over a tree"),
    Hook(f"{_SRT}.speculative.spec_utils.GrammarTree", "from_host", purpose="structured output over a tree"),
    Hook(f"{_SRT}.layers.logprob_processor", "compute_spec_logprobs", ("batch", "logits_output", "predict",
         "accept_index"), purpose="logprobs of accepted tokens"),
    Hook(f"{_SRT}.sampling.sampling_batch_info.SamplingBatchInfo", "apply_logits_bias", ("logits",),
         purpose="penalties and logit bias"),
    Hook(f"{_SRT}.layers.sampler", "apply_custom_logit_processor", ("num_tokens_in_batch",),
         purpose="custom logit processors"),
    Hook(f"{_SRT}.plugins.hook_registry.HookRegistry", "register", ("target", "hook"), purpose="the patches"),
    Hook(f"{_SRT}.utils.hf_transformers_utils", "get_config", ("model", "trust_remote_code", "revision"),
         purpose="the model's configuration"),
    _patched(CORPUS_SPEC, (), "corpora over HTTP"),
)  # fmt: skip

# What a method that runs the target model needs besides.
MODEL_HOOKS: tuple[Hook, ...] = (
    Hook(f"{_SRT}.model_executor.forward_batch_info.ForwardBatch", "init_new", ("batch", "model_runner",
         "return_hidden_states_before_norm"), purpose="a draft pass"),
    Hook(f"{_SRT}.model_executor.model_runner.ModelRunner", "forward", ("forward_batch",), purpose="a draft pass"),
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
