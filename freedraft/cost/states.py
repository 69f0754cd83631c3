"""Bytes of recurrent states, from a model's Hugging Face configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from freedraft.cost.hardware import DTYPE_BYTES

_RECURRENT = {"linear_attention", "mamba", "mamba2", "conv"}  # kinds of layers


class State(NamedTuple):
    """Bytes of one state of a request, over the recurrent layers of a rank."""

    matrices: float  # of what the recurrence keeps
    windows: float  # of a convolution's last inputs

    @property
    def total(self) -> float:
        return self.matrices + self.windows


def layer_kinds(config: Mapping[str, Any], layers: int) -> list[str]:
    """The kind of each layer as configurations name them; without a list of kinds "linear_attention" for recurrent and
    "full_attention" for others. layers: their number."""
    if kinds := config.get("layer_types") or config.get("layers_block_type"):
        return [str(kind) for kind in kinds]
    if pattern := config.get("hybrid_override_pattern"):  # Nemotron-H
        names = {"M": "mamba", "*": "full_attention", "E": "moe", "-": "mlp"}
        return [names.get(letter, letter) for letter in pattern]
    linear = config.get("linear_attn_config") or {}
    every = int(config.get("full_attention_interval") or 0)
    if "kda_layers" in linear:  # Kimi-Linear counts from 1
        recurrent = {int(i) - 1 for i in linear["kda_layers"]}
    elif every and config.get("linear_num_value_heads"):
        recurrent = {i for i in range(layers) if (i + 1) % every}
    else:  # Falcon-H1 has both in each layer
        recurrent = set(range(layers)) if config.get("mamba_d_state") else set()
    return ["linear_attention" if i in recurrent else "full_attention" for i in range(layers)]


def state_of(config: Mapping[str, Any], ranks: int = 1) -> State | None:
    """The state of Gated DeltaNet, Kimi Delta Attention, Mamba2 or short convolutions; None without any. The matrices
    are float32 unless the configuration names another dtype, the windows of two bytes per element.

    Args:
        config: as in config.json, that of the text decoder inside or not. ranks: tensor-parallel ones.

    Raises KeyError or ValueError: the configuration misses a size.
    """
    config = {**config, **(config.get("text_config") or {})}
    kinds = layer_kinds(config, int(config.get("num_hidden_layers") or 0))
    layers = sum(kind in _RECURRENT for kind in kinds)
    if not layers:
        return None
    numbers, channels, width = _sizes(config, ranks)
    name = str(config.get("mamba_ssm_dtype") or config.get("mamba_ssm_cache_dtype") or "float32")
    return State(layers * numbers / ranks * DTYPE_BYTES[name], layers * channels / ranks * (width - 1) * 2)


def _sizes(config: Mapping[str, Any], ranks: int) -> tuple[int, int, int]:
    """Of a layer over all ranks: numbers of its matrices, channels and width of its convolution."""
    if linear := config.get("linear_attn_config"):
        heads, head = int(linear["num_heads"]), int(linear["head_dim"])
        return heads * head * head, 3 * heads * head, int(linear["short_conv_kernel_size"])
    if heads := int(config.get("linear_num_value_heads") or 0):
        key, value = int(config["linear_key_head_dim"]), int(config["linear_value_head_dim"])
        channels = 2 * int(config["linear_num_key_heads"]) * key + heads * value
        return heads * key * value, channels, int(config["linear_conv_kernel_dim"])
    if width := int(config.get("conv_L_cache") or 0):
        return 0, int(config["hidden_size"]), width
    names = (
        ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel"),  # Nemotron-H
        ("mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv"),
    )
    heads, head, state, groups, width = (int(config[name]) for name in names["mamba_d_state" in config])
    groups = groups if groups % ranks == 0 else ranks  # each rank has the whole group of its heads
    return heads * head * state, heads * head + 2 * groups * state, width
