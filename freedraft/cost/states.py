"""Bytes of recurrent states, from a model's Hugging Face configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from freedraft.cost.hardware import DTYPE_BYTES


def layer_kinds(config: Mapping[str, Any], layers: int) -> list[str]:
    """The kind of each layer as configurations name them; without a list "linear_attention" or "full_attention".
    layers: their number."""
    if kinds := config.get("layer_types") or config.get("layers_block_type"):
        return [str(kind) for kind in kinds]
    if pattern := config.get("hybrid_override_pattern"):  # Nemotron-H
        return [{"M": "mamba", "*": "full_attention", "E": "moe"}.get(letter, "mlp") for letter in pattern]
    kda = (config.get("linear_attn_config") or {}).get("kda_layers")  # Kimi-Linear counts from 1
    every = int(config.get("full_attention_interval") or 0)  # Qwen3-Next; Falcon-H1 has both in each layer
    default = "mamba_d_state" in config
    recurrent = [i + 1 in kda if kda else bool((i + 1) % every) if every else default for i in range(layers)]
    return ["linear_attention" if each else "full_attention" for each in recurrent]


def state_bytes(config: Mapping[str, Any], ranks: int = 1) -> float:
    """Bytes of one state of a request over all layers of a rank: matrices of Gated DeltaNet, Kimi Delta Attention or
    Mamba2, float32 unless the configuration names another dtype, and last inputs of convolutions, two bytes each; 0
    without recurrent layers.

    Args:
        config: as in config.json; the text decoder may be inside. ranks: tensor-parallel ones.

    Raises KeyError or ValueError: the configuration misses a size.
    """
    config = {**config, **(config.get("text_config") or {})}
    kinds = layer_kinds(config, int(config.get("num_hidden_layers") or 0))
    layers = sum(kind in ("linear_attention", "mamba", "conv") for kind in kinds)
    if not layers:
        return 0.0
    numbers, channels, width = _sizes(config, ranks)
    name = str(config.get("mamba_ssm_dtype") or config.get("mamba_ssm_cache_dtype") or "float32")
    return layers * (numbers * DTYPE_BYTES[name] + channels * (width - 1) * 2) / ranks


def _sizes(config: Mapping[str, Any], ranks: int) -> tuple[int, int, int]:
    """Of a layer over all ranks: numbers of its matrices, channels and width of its convolution."""
    if linear := config.get("linear_attn_config"):
        heads, head = int(linear["num_heads"]), int(linear["head_dim"])
        return heads * head * head, 3 * heads * head, int(linear["short_conv_kernel_size"])
    if heads := int(config.get("linear_num_value_heads") or 0):
        key, value = int(config["linear_key_head_dim"]), int(config["linear_value_head_dim"])
        channels = 2 * int(config["linear_num_key_heads"]) * key + heads * value
        return heads * key * value, channels, int(config["linear_conv_kernel_dim"])
    if width := int(config.get("conv_L_cache") or 0):  # LFM2
        return 0, int(config["hidden_size"]), width
    names = ["mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"]  # Nemotron-H
    if "mamba_d_state" in config:
        names = ["mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"]
    heads, head, state, groups, width = (int(config[name]) for name in names)
    groups = groups if groups % ranks == 0 else ranks  # each rank has the whole group of its heads
    return heads * head * state, heads * head + 2 * groups * state, width
