"""Sizes of published models, as the cost model and the engines' configurations read them, and where they stand."""

from typing import Any

_DELTA = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128, "head_dim": 256}
_THREE_OF_FOUR = [*3 * ["linear_attention"], "full_attention"]
_FULL = [4, 8, 12, 16, 20, 24, 27]  # layers of Kimi-Linear, counted from 1

QWEN3_NEXT_80B: dict[str, Any] = _DELTA | {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "dtype": "bfloat16", "hidden_size": 2048,
    "intermediate_size": 5120, "vocab_size": 151936, "num_hidden_layers": 48, "num_attention_heads": 16,
    "num_key_value_heads": 2, "linear_num_key_heads": 16, "linear_num_value_heads": 32, "num_experts": 512,
    "num_experts_per_tok": 10, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "max_position_embeddings": 262144, "full_attention_interval": 4, "layer_types": 12 * _THREE_OF_FOUR,
}  # fmt: skip
_TEXT_27B = _DELTA | {
    "model_type": "qwen3_5_text", "dtype": "bfloat16", "mamba_ssm_dtype": "float32", "hidden_size": 5120,
    "intermediate_size": 17408, "vocab_size": 248320, "num_hidden_layers": 64, "num_attention_heads": 24,
    "num_key_value_heads": 4, "linear_num_key_heads": 16, "linear_num_value_heads": 48, "full_attention_interval": 4,
    "max_position_embeddings": 262144,
}  # fmt: skip
QWEN36_27B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "text_config": _TEXT_27B,
}  # fmt: skip
KIMI_LINEAR_48B: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"], "model_type": "kimi_linear", "dtype": "bfloat16", "hidden_size": 2304,
    "intermediate_size": 9216, "moe_intermediate_size": 1024, "num_hidden_layers": 27, "num_attention_heads": 32,
    "num_key_value_heads": 32, "head_dim": 72, "vocab_size": 163840, "num_experts": 256, "num_experts_per_token": 8,
    "num_shared_experts": 1, "first_k_dense_replace": 1, "moe_layer_freq": 1, "kv_lora_rank": 512, "q_lora_rank": None,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 1048576,
    "linear_attn_config": {
        "full_attn_layers": _FULL, "kda_layers": [i for i in range(1, 28) if i not in _FULL],
        "num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4,
    },
}  # fmt: skip
NEMOTRON3_NANO_30B: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "dtype": "bfloat16", "hidden_size": 2688,
    "intermediate_size": 1856, "vocab_size": 131072, "num_hidden_layers": 52, "num_attention_heads": 32,
    "num_key_value_heads": 2, "head_dim": 128, "mamba_num_heads": 64, "mamba_head_dim": 64, "ssm_state_size": 128,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "n_groups": 8, "conv_kernel": 4,
    "mamba_ssm_cache_dtype": "float32", "n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 1,
    "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "max_position_embeddings": 262144,
}  # fmt: skip
QWEN3_30B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16", "hidden_size": 2048,
    "intermediate_size": 6144, "vocab_size": 151936, "num_hidden_layers": 48, "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "max_position_embeddings": 40960,
}  # fmt: skip
QWEN3_235B = QWEN3_30B | {
    "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 94, "num_attention_heads": 64,
    "moe_intermediate_size": 1536,
}  # fmt: skip
# Small models of other kinds of recurrence
_MAMBA = {"mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1, "mamba_d_conv": 4, "mamba_expand": 2}
FALCON_H1: dict[str, Any] = _MAMBA | {
    "architectures": ["FalconH1ForCausalLM"], "model_type": "falcon_h1", "dtype": "bfloat16", "hidden_size": 1024,
    "intermediate_size": 2048, "vocab_size": 32784, "num_hidden_layers": 36, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "mamba_d_ssm": 1536, "mamba_n_heads": 24,
}  # fmt: skip
GRANITE4: dict[str, Any] = _MAMBA | {
    "architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "dtype": "bfloat16",
    "hidden_size": 1536, "intermediate_size": 512, "vocab_size": 100352, "num_hidden_layers": 40,
    "num_attention_heads": 12, "num_key_value_heads": 4, "num_local_experts": 62, "num_experts_per_tok": 6,
    "mamba_n_heads": 48, "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)],
}  # fmt: skip
LFM2: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", "dtype": "bfloat16", "hidden_size": 1024,
    "intermediate_size": 6656, "vocab_size": 65536, "num_hidden_layers": 16, "num_attention_heads": 16,
    "num_key_value_heads": 8, "conv_L_cache": 3, "conv_dim": 1024,
    "layer_types": ["full_attention" if i in (2, 5, 8, 10, 12, 14) else "conv" for i in range(16)],
}  # fmt: skip

SOURCES = {
    "Qwen3.6-27B": "Qwen/Qwen3.6-27B, as Qwen3.5-27B: THUDM/slime scripts/models/qwen3.5-27B.sh; recurrent heads: "
    "Qwen/Qwen3.5-27B config.json",
    "Qwen3-Next-80B-A3B": "defaults of huggingface/transformers configuration_qwen3_next.py; THUDM/slime "
    "scripts/models/qwen3-next-80B-A3B.sh",
    "Kimi-Linear-48B-A3B": "moonshotai/Kimi-Linear-48B-A3B-Instruct config.json; ml-explore/mlx-lm kimi_linear.py",
    "Nemotron-3-Nano-30B-A3B": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 config.json; NVIDIA/Megatron-LM "
    "examples/post_training/modelopt/conf/nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.sh",
    "Qwen3-30B-A3B": "Qwen/Qwen3-30B-A3B config.json; THUDM/slime scripts/models/qwen3-vl-30b-a3b.sh",
    "Qwen3-235B-A22B": "Qwen/Qwen3-235B-A22B config.json; THUDM/slime scripts/models/qwen3-vl-235b-a22b.sh",
}
