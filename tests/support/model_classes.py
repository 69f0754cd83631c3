"""The classes of models that people serve, as random models of two to four layers: one line of a table each."""

import json
from collections.abc import Container, Iterable
from pathlib import Path
from typing import Any

VOCAB_SIZE = 32
SHAPE = {"vocab_size": VOCAB_SIZE, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 32}
SHAPE |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 512, "initializer_range": 0.3}
SHAPE |= {"tie_word_embeddings": False, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
# Widths as kernels of latent attention have them.
LATENT = {"n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1, "kv_lora_rank": 512, "head_dim": 32}
LATENT |= {"q_lora_rank": 32, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
LATENT |= {"num_key_value_heads": 2, "n_group": 1, "topk_group": 1} | EXPERTS
WINDOWS = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 16}
DELTA = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32}

# By the name of a configuration of transformers: what it needs beside SHAPE.
ATTENTION: dict[str, dict[str, Any]] = {
    "Llama": {},
    "GPT2": {},
    "Phi3": {},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Olmoe": {"num_experts": 4, "num_key_value_heads": 2} | EXPERTS,
    "Qwen3Moe": {"num_experts": 4} | EXPERTS,
    "GptOss": {"num_local_experts": 4} | WINDOWS | EXPERTS,
    "Gemma2": WINDOWS | {"tie_word_embeddings": True},
    "Gemma3Text": WINDOWS,
    "Cohere2": WINDOWS,
    "DeepseekV2": LATENT,
    "DeepseekV3": LATENT | {"topk_method": "noaux_tc"},
}
RECURRENT: dict[str, dict[str, Any]] = {
    "FalconH1": MAMBA2 | {"mamba_d_ssm": 64},
    "GraniteMoeHybrid": MAMBA2
    | {"mamba_expand": 1, "layers_block_type": ["mamba", "attention"]}
    | {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Lfm2": {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}
    | {"conv_dim": 64, "block_dim": 64},
    "Qwen3Next": {"layer_types": ["linear_attention", "full_attention"], "num_experts": 4}
    | DELTA
    | EXPERTS
    | {"full_attention_interval": 2},
}
KIMI: dict[str, dict[str, Any]] = {
    "KimiLinear": {"num_local_experts": 4, "num_key_value_heads": 2, "first_k_dense_replace": 1, "mla_use_nope": True}
    | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "v_head_dim": 32}
    | {"linear_attn_config": {"kda_layers": [1], "full_attn_layers": [2], "num_heads": 2, "head_dim": 16}
       | {"short_conv_kernel_size": 4}} | EXPERTS,
}  # fmt: skip
# Another class has the same kinds of layers: tests of engines that take longest leave these out where time is short.
RARE = ("Llama", "GPT2", "Phi3", "Olmoe", "Qwen3Moe", "Cohere2", "Gemma2", "Gemma3", "Gemma3Text")
RARE += ("DeepseekV2", "GraniteMoeHybrid", "FalconH1")
# Quantised weights, by kind: a configuration as such models have it.
MIDDLES = -0x77777778  # eight zero points of 8
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTISED: dict[str, dict[str, Any]] = {
    "int8": {
        "quant_method": "compressed-tensors", "format": "int-quantized", "ignore": ["lm_head"],
        "config_groups": {"all": {
            "targets": ["Linear"], "weights": INT8 | {"strategy": "channel"},
            "input_activations": INT8 | {"strategy": "token", "dynamic": True},
        }},
    },
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True},
}  # fmt: skip
CLASSES = ATTENTION | RECURRENT | KIMI


def by_class(names: Iterable[str], always: Container[str] = (), rare: Container[str] = RARE) -> list[Any]:
    """Parameters of a test of an engine that starts slowly. always: names that `make test` runs."""
    import pytest

    marks = {name: [pytest.mark.extended] + [pytest.mark.rare] * (name in rare) for name in names}
    return [pytest.param(name, marks=() if name in always else each) for name, each in marks.items()]


def class_config(name: str) -> Any:
    """The configuration of a class of the table, float32."""
    import torch
    import transformers

    config = getattr(transformers, f"{name}Config")(**SHAPE | CLASSES[name])
    config.dtype = torch.float32
    return config


def save_config(name: str, folder: Path) -> None:
    """The configuration alone."""
    config = class_config(name)
    config.architectures = [f"{name}ForCausalLM"]
    config.save_pretrained(folder)


def class_model(name: str, seed: int = 7) -> Any:
    """A random model of a class of the table, float32."""
    import torch
    import transformers

    torch.manual_seed(seed)
    config = class_config(name)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    if config.tie_word_embeddings:  # else each token is followed by itself
        model.get_input_embeddings().weight.data *= 0.02
    return model


def save_class(name: str, folder: Path, seed: int = 7) -> Path:
    """Such a model, without a tokenizer."""
    return save_model(class_model(name, seed), folder)


def save_model(model: Any, folder: Path) -> Path:
    """In the names of published checkpoints, which transformers gives to the wrong ones of Kimi-Linear's layers."""
    from safetensors.torch import load_file, save_file

    model.save_pretrained(folder)
    if model.config.model_type == "kimi_linear":
        tensors = load_file(folder / "model.safetensors")
        named = {name.replace("layers.0.block_sparse_moe", "layers.0.mlp"): each for name, each in tensors.items()}
        save_file(named, folder / "model.safetensors", {"format": "pt"})
    return folder


def quantise(folder: Path, kind: str, group: int = 32) -> Path:
    """A saved Llama, its linear layers in place of weights with random ones of this kind: int8, gptq or awq."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors, quantised = load_file(folder / "model.safetensors"), {}
    for name, weight in tensors.items():
        layer, (rows, columns) = name.removesuffix(".weight"), (*weight.shape, 0)[:2]
        if not name.endswith("_proj.weight"):
            quantised[name] = weight
        elif kind == "int8":
            scale = weight.abs().amax(1, keepdim=True) / 127
            quantised |= {name: (weight / scale).round().to(torch.int8), f"{layer}.weight_scale": scale}
        else:
            packed = (columns // 8, rows) if kind == "gptq" else (columns, rows // 8)
            quantised[f"{layer}.qweight"] = torch.randint(-(2**31), 2**31, packed).to(torch.int32)
            quantised[f"{layer}.qzeros"] = torch.full((columns // group, rows // 8), MIDDLES).to(torch.int32)
            quantised[f"{layer}.scales"] = torch.full((columns // group, rows), 0.06)
    save_file(quantised, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTISED[kind]}))
    return folder
